"""Collectives among ranks of several hosts: messages by this package's own connections.

Every rank talks to every other directly. What is sent lies in the caller's tensors, so a call ends only when the
kernel has taken all of it.

[Note: one round] A call begins with a frame from every rank to every other, which says what the call is. A few
bytes travel in that frame too, behind the words: so a small collective is one round. Who receives looks at the
words first, and writes to the caller's tensors only when they are those of its own call. It sees from the frame's
length whether bytes came with it.

[Note: summed in segments] What is summed travels in segments, all of which are queued at once: while a segment is
added up the next ones travel, and what is done is sent on.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from ...core.vocabulary.errors import Mismatch, Stalled
from ..messages import ONE_ROUND_BYTES
from ..transport.group_messages import FrameTransport
from ..transport.rank_group import PieceExchange, RankGroup
from ..transport.transport import PendingMessage
from .collectives import TEXT_BYTES, combine, differing

SEGMENT_BYTES = 256 * 1024
"""See [Note: summed in segments]."""
_EARLY_BYTES = 64 * 1024
"""The most that travels behind the words. See [Note: one round]."""
_PAIR_BYTES = 64 * 1024
"""Two ranks exchange whole tensors up to here: one round, and no byte more than in two."""
_CALL_BITS = 24
"""A call has fewer messages than two to the power of this."""
_HEAD = struct.Struct("=HH")
"""Length of the text, and of the row."""
_NOTHING = torch.empty(0, dtype=torch.uint8)


@dataclass
class PieceSum:
    """This rank's pieces of all ranks of a circle, on their way. See [Note: summed in segments]."""

    exchange: MessageExchange
    circle: RankGroup
    rows: Sequence[torch.Tensor]
    """By rank in the circle: mine, and room for the others'."""
    bounds: Sequence[tuple[int, int]]
    flights: Sequence[PendingMessage]

    def combine(
        self, out: torch.Tensor, operation: str, divisor: int, *, collect: Sequence[torch.Tensor] = ()
    ) -> list[PendingMessage]:
        """Combine the pieces into `out` as they arrive; with `collect`, send it to all and receive theirs there.

        Returns what is on its way then. `out` may be this rank's piece. `divisor`: of a mean.
        """
        others = [rank for rank in range(len(self.rows)) if rank != self.circle.seat.rank]
        later = []
        for flight, (begin, end) in zip(self.flights, self.bounds, strict=True):
            flight.wait()
            part = out[begin:end]
            combine(part, [row[begin:end] for row in self.rows], operation, divisor)
            if collect:
                incoming = {rank: as_bytes(collect[rank][begin:end]) for rank in others}
                later.append(self.exchange.start(dict.fromkeys(others, as_bytes(part)), incoming, self.circle))
        return later


class MessageExchange:
    """See `collectives.GroupExchange`. Used by the thread that owns `transport`."""

    def __init__(self, transport: FrameTransport, names: Sequence[int]) -> None:
        """`names`: the global ranks of the group, for errors."""
        self.rank = transport.rank
        self.size = len(names)
        self._transport = transport
        self._names = names
        self._everyone = RankGroup(tuple(range(self.size)), self.rank)
        self._others = [(self.rank + step) % self.size for step in range(1, self.size)]
        self._calls = 0
        self._tags = count()
        """The tags of this call: what one rank has more of than another leaves the next call's as they are."""
        self._call = ""
        self._words: bytes | None = None
        """What this rank is about to do, until it has told the others."""

    def agree(self, call: str, row: Sequence[int], seconds: float) -> list[tuple[int, ...]]:
        """See `GroupExchange`."""
        self._transport.timeout_seconds = seconds
        self._transport.peers.operation = call
        self._calls += 1
        self._tags = count(self._calls << _CALL_BITS)
        text = call.encode()[:TEXT_BYTES]
        self._call = text.decode(errors="replace")
        self._words = _HEAD.pack(len(text), len(row)) + text + struct.pack(f"={len(row)}q", *row)
        return self._compare({})[0] if row else []

    def conclude(self) -> None:
        """See `GroupExchange`."""
        if self._words is not None:
            self._compare({})
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

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """See `GroupExchange`; a long tensor goes through all ranks."""
        if self.size > 2 and flat.numel() > _EARLY_BYTES:
            self._agree_now()
            self._spread(flat, root, self._everyone)
        elif self.rank == root:
            self.swap(dict.fromkeys(self._others, flat), {}, 0)
        else:
            self.swap({}, {root: flat}, 0)

    def all_gather(self, flat: torch.Tensor, outs: Sequence[torch.Tensor]) -> None:
        """See `GroupExchange`."""
        self.swap(dict.fromkeys(self._others, flat), {rank: outs[rank] for rank in self._others}, 0)

    def publish(
        self, mine: torch.Tensor | None, incoming: Mapping[int, torch.Tensor], *, readers: Sequence[int]
    ) -> None:
        """See `GroupExchange`."""
        self.swap({} if mine is None else dict.fromkeys(readers, mine), incoming, 0)

    def swap(
        self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor], longest: int
    ) -> None:
        """See `GroupExchange`; `longest` is of no use here."""
        early: dict[int, memoryview] = {}
        if self._words is not None:
            few = {rank: piece for rank, piece in outgoing.items() if piece.numel() <= _EARLY_BYTES}
            early = self._compare(few)[1]
            outgoing = {rank: piece for rank, piece in outgoing.items() if rank not in few}
            for rank, frame in early.items():
                if rank in incoming:
                    incoming[rank].copy_(torch.frombuffer(frame, dtype=torch.uint8))
            incoming = {rank: into for rank, into in incoming.items() if rank not in early}
        self.start(outgoing, incoming, self._everyone).wait()

    def all_reduce(self, flat: torch.Tensor, operation: str) -> None:
        """See `GroupExchange`: every rank combines a slice, which all collect; small ones in one round."""
        if flat.nbytes * self.size <= ONE_ROUND_BYTES or (self.size == 2 and flat.nbytes <= _PAIR_BYTES):
            rows = [torch.empty_like(flat) for _ in range(self.size)]
            rows[self.rank] = flat
            others = {rank: as_bytes(rows[rank]) for rank in self._others}
            self.swap(dict.fromkeys(self._others, as_bytes(flat)), others, 0)
            combine(flat, rows, operation)
            return
        self._agree_now()
        pieces = cut(flat, self.size)
        begun = self._begin_sum(pieces, self._everyone)
        for flight in begun.combine(pieces[self.rank], operation, self.size, collect=pieces):
            flight.wait()

    def reduce_scatter(self, out: torch.Tensor, pieces: Sequence[torch.Tensor], operation: str) -> None:
        """See `GroupExchange`."""
        self._agree_now()
        self._begin_sum(pieces, self._everyone).combine(out, operation, self.size)

    # -- for those that exchange among some of the ranks -----------------------------------------------

    def _agree_now(self) -> None:
        if self._words is not None:
            self._compare({})

    def _begin_sum(self, pieces: Sequence[torch.Tensor], circle: RankGroup) -> PieceSum:
        """Send each rank of `circle` its piece; the first is the longest."""
        rows = [torch.empty_like(pieces[circle.seat.rank]) for _ in pieces]
        step = SEGMENT_BYTES // pieces[0].itemsize
        bounds = [(begin, begin + step) for begin in range(0, pieces[0].numel(), step)]
        others = [rank for rank in range(circle.seat.size) if rank != circle.seat.rank]
        rows[circle.seat.rank] = pieces[circle.seat.rank]
        flights = [
            self.start(
                {rank: as_bytes(pieces[rank][begin:end]) for rank in others},
                {rank: as_bytes(rows[rank][begin:end]) for rank in others},
                circle,
            )
            for begin, end in bounds
        ]
        return PieceSum(self, circle, rows, bounds, flights)

    def _spread(self, flat: torch.Tensor, root: int, circle: RankGroup) -> None:
        """Give all ranks of `circle` the bytes of `root`, so that its link carries them once.

        It sends each of the others a part, which that one sends to the rest.
        """
        me, size = circle.seat.rank, circle.seat.size
        others = [rank for rank in range(size) if rank != root]
        chunks = [
            dict(zip(others, cut(chunk, len(others)), strict=True))
            for chunk in flat.split(SEGMENT_BYTES * len(others))
        ]
        if me == root:
            flights = [self.start(parts, {}, circle) for parts in chunks]
        else:
            flights = [self.start({}, {root: parts[me]}, circle) for parts in chunks]
        later = []
        for flight, parts in zip(flights, chunks, strict=True):
            flight.wait()
            rest = [] if me == root else [rank for rank in others if rank != me]
            outgoing = dict.fromkeys(rest, parts[me]) if rest else {}
            later.append(self.start(outgoing, {rank: parts[rank] for rank in rest}, circle))
        for flight in later:
            flight.wait()

    def start(
        self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor], circle: RankGroup
    ) -> PendingMessage:
        """Begin to exchange bytes among `circle`, by rank in it. To be called by all of them, also without any."""
        ranks = range(circle.seat.size)
        parts = PieceExchange(
            [outgoing.get(rank, _NOTHING) for rank in ranks], [incoming.get(rank, _NOTHING) for rank in ranks]
        )
        return self._transport.start_parts(parts, next(self._tags), circle)

    # -- words ---------------------------------------------------------------------------------------

    def _compare(
        self, outgoing: Mapping[int, torch.Tensor]
    ) -> tuple[list[tuple[int, ...]], dict[int, memoryview]]:
        """Tell all others my words, with these bytes; return all rows, and the bytes that came.

        See [Note: one round].

        Raises `Mismatch` when another rank makes another call.
        """
        words, self._words = self._words, None
        assert words is not None, "a call that was begun"
        tag = next(self._tags)
        frames: dict[tuple[int, int], memoryview] = {}
        for rank in self._others:
            piece = outgoing.get(rank, _NOTHING)
            key = (piece.data_ptr(), piece.numel()) if piece.numel() else (0, 0)
            if key not in frames:  # most send one tensor to all
                frames[key] = memoryview(words + _plain(piece))
            self._transport.send_frame(rank, tag, frames[key])
        heard = self._transport.take_frames(self._others, tag)
        heard[self.rank] = memoryview(words)
        calls, rows, early = [], [], {}
        for rank in range(self.size):
            text, row, rest = self._read(heard[rank], rank)
            calls.append(text)
            rows.append(row)
            if rest:
                early[rank] = rest
        problem = differing(self.rank, calls, self._names)
        if problem is not None:
            raise problem
        return rows, early

    def _read(self, frame: memoryview, rank: int) -> tuple[str, tuple[int, ...], memoryview]:
        try:
            length, numbers = _HEAD.unpack_from(frame)
            text = bytes(frame[_HEAD.size : _HEAD.size + length]).decode(errors="replace")
            row = struct.unpack_from(f"={numbers}q", frame, _HEAD.size + length)
        except struct.error:
            raise Mismatch(
                f"rank {self._names[rank]} sent {len(frame)} bytes that are no call",
                rank=self._names[self.rank],
                operation=self._call,
                remedy="the connection is that of another program, or of another version of this one",
            ) from None
        return text, row, frame[_HEAD.size + length + 8 * numbers :]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's memory as uint8."""
    return tensor.view(torch.uint8)


def cut(flat: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Return so many parts of almost one length, the last ones perhaps empty."""
    length = -(-flat.numel() // count)
    return [flat[i * length : (i + 1) * length] for i in range(count)]


def _plain(piece: torch.Tensor) -> memoryview:
    array: Any = piece.numpy()
    return memoryview(array)
