"""Collectives among hosts with several ranks each: what is long meets in shared memory inside each host first.

With G ranks a host each local rank carries 1/G across, to the ranks of other hosts with its local number: those of
its column. A host's link then carries what one rank a host would have to send, where ranks that talk to all others
directly send G times as much. Calls are compared among all ranks, and small collectives are one round among all,
as in `message_exchange`.

[Note: chunks] What is long is cut into chunks: what a host has added up of one is on its way while the host adds
up the next one.

[Note: served while inside] A rank that waits inside its host goes on serving its connections: ranks of other
hosts may wait for it, and keep those waiting that it waits for.

[Note: who was first] A rank that meets an error leaves its host's memory and tells all ranks why. Those of its
host that wait for it there look for that reason, so that all name the rank that failed first.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ....core.vocabulary.errors import PeerLost
from ...named_ops.reductions import HostGroups
from ...transport.group_messages import FrameTransport
from ...transport.transport import PendingMessage
from .exchange import summed_type
from .host_exchange import HostExchange
from .message_exchange import MessageExchange, PieceSum, as_bytes, cut

DIRECT_BYTES = 64 * 1024
"""Up to here all ranks exchange with each other directly: fewer steps."""
CHUNK_BYTES = 4 * 2**20
"""See [Note: chunks]."""
_REASON_SECONDS = 1.0
"""See [Note: who was first]."""


class ByHostExchange(MessageExchange):
    """See `exchange.GroupExchange`."""

    def __init__(
        self, transport: FrameTransport, names: Sequence[int], inside: HostExchange, groups: HostGroups,
        hosts: Sequence[int],
    ) -> None:  # fmt: skip
        """`inside`: among this host's ranks. `hosts`: the number of each rank's host."""
        super().__init__(transport, names)
        self._inside = inside
        self._across = groups.across
        by_host: dict[int, list[int]] = {}
        for rank, host in enumerate(hosts):
            by_host.setdefault(host, []).append(rank)
        self._columns = [sorted(column) for column in zip(*by_host.values(), strict=True)]
        """The ranks with each local number."""
        self._host = groups.across.seat.rank
        """Which one of its column this rank is."""
        inside.serve_while_waiting(transport.serve_now)

    def agree(self, call: str, row: Sequence[int], seconds: float) -> list[tuple[int, ...]]:
        """See `GroupExchange`."""
        self._inside.agree(call, (), seconds)
        return super().agree(call, row, seconds)

    def all_reduce(self, flat: torch.Tensor, operation: str) -> None:
        """See `GroupExchange`."""
        if flat.nbytes <= DIRECT_BYTES:
            super().all_reduce(flat, operation)
            return
        self._agree_now()
        begun: list[tuple[list[torch.Tensor], PieceSum]] = []
        with self._inside_named():
            for chunk in flat.split(CHUNK_BYTES // flat.itemsize):
                slices = cut(chunk, self._inside.size)
                partial = self._sum_inside(slices, operation)
                begun.append((slices, self._begin_sum(cut(partial, len(self._across.ranks)), self._across)))
            under_way: list[tuple[list[torch.Tensor], list[PendingMessage]]] = []
            for slices, pieces in begun:
                targets = cut(slices[self._inside.rank], len(self._across.ranks))
                later = pieces.combine(targets[self._host], operation, self.size, collect=targets)
                under_way.append((slices, later))
            for slices, flights in under_way:
                for flight in flights:
                    flight.wait()
                each = [as_bytes(part) for part in slices]
                self._inside.all_gather(each[self._inside.rank], each)

    def reduce_scatter(self, out: torch.Tensor, pieces: Sequence[torch.Tensor], operation: str) -> None:
        """See `GroupExchange`."""
        if out.nbytes <= DIRECT_BYTES:
            super().reduce_scatter(out, pieces, operation)
            return
        self._agree_now()
        step = max(1, CHUNK_BYTES // out.itemsize // self.size)
        begun: list[tuple[torch.Tensor, PieceSum]] = []
        with self._inside_named():
            for begin in range(0, out.numel(), step):
                end = begin + step
                partial = [
                    self._sum_inside([pieces[rank][begin:end] for rank in row], operation)
                    for row in zip(*self._columns, strict=True)
                ]
                begun.append((out[begin:end], self._begin_sum(partial, self._across)))
            for part, each in begun:
                each.combine(part, operation, self.size)

    def all_gather(self, flat: torch.Tensor, outs: Sequence[torch.Tensor]) -> None:
        """See `GroupExchange`."""
        if flat.nbytes <= DIRECT_BYTES:
            super().all_gather(flat, outs)
            return
        self._agree_now()
        column = self._columns[self._inside.rank]
        others = [host for host in range(len(column)) if host != self._host]
        begun = []
        with self._inside_named():
            for begin in range(0, flat.numel(), CHUNK_BYTES):
                part = slice(begin, begin + CHUNK_BYTES)
                incoming = {host: outs[column[host]][part] for host in others}
                begun.append((part, self.start(dict.fromkeys(others, flat[part]), incoming, self._across)))
            for host, row in enumerate(zip(*self._columns, strict=True)):
                if host == self._host:
                    self._inside.all_gather(flat, [outs[rank] for rank in row])
            for part, flight in begun:
                flight.wait()
                for host in others:
                    theirs = [outs[ranks[host]][part] for ranks in self._columns]
                    self._inside.all_gather(theirs[self._inside.rank], theirs)

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """See `GroupExchange`."""
        if flat.nbytes <= DIRECT_BYTES:
            super().broadcast(flat, root)
            return
        self._agree_now()
        place = next(place for place, column in enumerate(self._columns) if root in column)
        host = self._columns[place].index(root)
        slices = cut(flat, self._inside.size)
        with self._inside_named():
            if host == self._host:
                self._inside.broadcast(flat, place)
            self._spread(slices[self._inside.rank], host, self._across)
            if host != self._host:
                self._inside.all_gather(slices[self._inside.rank], slices)

    def _sum_inside(self, slices: Sequence[torch.Tensor], operation: str) -> torch.Tensor:
        """Return this rank's slice of its host's, combined, a mean without its division."""
        mine = slices[self._inside.rank]
        partial = torch.empty_like(mine, dtype=summed_type(mine.dtype))
        self._inside.reduce_scatter(partial, slices, "SUM" if operation == "AVG" else operation)
        return partial

    @contextmanager
    def _inside_named(self) -> Iterator[None]:
        """See [Note: who was first]."""
        try:
            yield
        except PeerLost:
            deadline = time.monotonic() + _REASON_SECONDS
            while time.monotonic() < deadline:
                self._transport.refuse_lost(set(self._others))
                self._transport.serve(0.05)
            raise
