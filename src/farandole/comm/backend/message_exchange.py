"""Collectives among ranks of several hosts: messages by this package's own connections.

Every rank talks to every other directly. What is sent lies in the caller's tensors, so each method ends only when
the kernel has taken all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count

import torch

from ...core.vocabulary.errors import Stalled
from ..messages.all_reduce import ONE_ROUND_BYTES
from ..messages.message import Message
from ..transport.rank_group import PieceExchange, RankGroup
from ..transport.transport import Transport
from .exchange import TEXT_BYTES, differing
from .reductions import combine

_NOTHING = torch.empty(0, dtype=torch.uint8)


class MessageExchange:
    """See `exchange.GroupExchange`. Used by the thread that owns `transport`."""

    def __init__(self, transport: Transport, names: Sequence[int]) -> None:
        """`names`: the global ranks of the group, for errors."""
        self.rank = transport.rank
        self.size = len(names)
        self._transport = transport
        self._names = names
        self._circle = RankGroup(tuple(range(self.size)), self.rank)
        self._tags = count()

    def agree(self, call: str, row: Sequence[int], seconds: float) -> list[tuple[int, ...]]:
        """See `GroupExchange`. All send all others a message of one length, whatever they are about to do."""
        self._transport.timeout_seconds = seconds
        self._transport.peers.operation = call
        said = torch.zeros(TEXT_BYTES + 16 * self.size, dtype=torch.uint8)
        text = call.encode()[:TEXT_BYTES]
        said[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        if row:
            numbers = torch.tensor(row, dtype=torch.int64)
            said[TEXT_BYTES : TEXT_BYTES + 8 * len(row)].view(torch.int64).copy_(numbers)
        heard = self._transport.start(Message(said, "all_gather"), next(self._tags), self._circle).wait()
        calls = [bytes(place[:TEXT_BYTES].numpy()).rstrip(b"\0").decode(errors="replace") for place in heard]
        problem = differing(self.rank, calls, self._names)
        self._flush()
        if problem is not None:
            raise problem
        return [
            tuple(int(n) for n in place[TEXT_BYTES : TEXT_BYTES + 8 * len(row)].view(torch.int64))
            for place in heard
        ]

    def publish(
        self, mine: torch.Tensor | None, incoming: Mapping[int, torch.Tensor], *, readers: Sequence[int]
    ) -> None:
        """See `GroupExchange`."""
        outgoing = {} if mine is None else dict.fromkeys(readers, mine)
        self.swap(outgoing, incoming, 0)

    def swap(
        self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor], longest: int
    ) -> None:
        """See `GroupExchange`; `longest` is of no use here."""
        ranks = range(self.size)
        parts = PieceExchange(
            [outgoing.get(rank, _NOTHING) for rank in ranks], [incoming.get(rank, _NOTHING) for rank in ranks]
        )
        self._transport.start_parts(parts, next(self._tags), self._circle).wait()
        if self.rank in incoming:
            incoming[self.rank].copy_(outgoing[self.rank])
        self._flush()

    def all_reduce(self, flat: torch.Tensor, operation: str) -> None:
        """See `GroupExchange`: every rank combines a slice, which all collect; small ones in one round."""
        everyone = range(self.size)
        if flat.nbytes * self.size <= ONE_ROUND_BYTES:
            rows = [torch.empty_like(flat) for _ in everyone]
            self.publish(_bytes(flat), {rank: _bytes(row) for rank, row in enumerate(rows)}, readers=everyone)
            combine(flat, rows, operation)
            return
        length = -(-flat.numel() // self.size)
        pieces = [flat[i * length : (i + 1) * length] for i in everyone]
        mine = torch.empty_like(pieces[self.rank])
        self.reduce_scatter(mine, pieces, operation)
        incoming = {rank: _bytes(piece) for rank, piece in enumerate(pieces)}
        self.swap(dict.fromkeys(everyone, _bytes(mine)), incoming, 0)

    def reduce_scatter(self, out: torch.Tensor, pieces: Sequence[torch.Tensor], operation: str) -> None:
        """See `GroupExchange`; here `pieces` may be unequal, where `out` is as long as this rank's."""
        rows = [torch.empty_like(out) for _ in pieces]
        rows[self.rank] = pieces[self.rank]
        self.swap(
            {rank: _bytes(piece) for rank, piece in enumerate(pieces) if rank != self.rank},
            {rank: _bytes(row) for rank, row in enumerate(rows) if rank != self.rank},
            0,
        )
        combine(out, rows, operation)

    def _flush(self) -> None:
        """Return when the kernel has all that was sent: the caller may change its tensors then."""
        transport = self._transport
        if not transport.has_more_to_send:
            return
        transport.drain(transport.timeout_seconds)
        if transport.has_more_to_send:
            raise Stalled(
                f"the other ranks took nothing for {transport.timeout_seconds:g} s",
                rank=self._names[self.rank],
                operation=transport.peers.operation,
            )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
