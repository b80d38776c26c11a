"""Collectives among ranks of one host: each writes into memory of its own, which all others read.

[Note: two halves] A rank's memory has two halves for data, used in turn. A round is: write into a half, wait at
the barrier, read the others' same half. There is no second barrier: a rank writes that half again two rounds
later, and then it has passed the barrier of the round between, at which every rank arrives only after it has
read. What a rank says of its next call lies in one of two places by the same rule: every call has a barrier.

What is longer than a half goes in several rounds; all ranks know how many, as they have agreed on the lengths.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...core.vocabulary.errors import Mismatch, PeerLost
from ..transport.group_messages import FrameTransport
from ..transport.host_memory import ALIGNMENT, PAGE_BYTES, HostBarrier, Peer, aligned, refuse, share
from ..transport.rank_group import HostGroups
from ..transport.transport import PendingMessage
from ..world.store_sync import all_gather_json
from ..world.world import World
from .collectives import TEXT_BYTES, combine, differing, summed_type
from .message_exchange import MessageExchange, PieceSum, as_bytes, cut

HALF_BYTES = 1024 * 1024
"""Small enough for a second-level cache to hold, large enough that a barrier is cheap beside it."""


class HostExchange:
    """See `collectives.GroupExchange`. Made by all ranks of a group at once."""

    def __init__(self, world: World, peers: Sequence[Peer], names: Sequence[int], timeout_seconds: float) -> None:
        """Map the memory of all `peers`, by rank in the group. `names`: their global ranks, for errors.

        Raises `Unavailable`, on all ranks, when memory cannot be shared, or processes not watched.
        """
        self.rank = [peer.rank for peer in peers].index(world.rank)
        self.size = len(peers)
        self._names = names
        self._half_bytes = max(HALF_BYTES, self.size * 16 * ALIGNMENT)
        self._row_bytes = aligned(2 * self.size * 8)
        says = TEXT_BYTES + self._row_bytes
        begin = PAGE_BYTES + 2 * says
        memory = share(world, "backend memory", peers, begin + 2 * self._half_bytes, {})
        self._says = [
            [_plain(part[PAGE_BYTES + i * says : PAGE_BYTES + (i + 1) * says]) for part in memory] for i in (0, 1)
        ]
        self._halves = [
            [part[begin + i * self._half_bytes : begin + (i + 1) * self._half_bytes] for part in memory]
            for i in (0, 1)
        ]
        self._turn = self._said = 0
        self._call, self._word = "nothing yet", 0
        self._is_agreed = True
        """Whether the calls of this turn have been compared."""
        named = [Peer(name, peer.host, peer.process) for name, peer in zip(names, peers, strict=True)]
        problem = ""
        try:
            self._barrier = HostBarrier(named, self.rank, [part[:PAGE_BYTES] for part in memory], timeout_seconds)
        except OSError as reason:
            problem = f"rank {names[self.rank]} on {world.host} cannot watch its peers: {reason}"
        try:
            refuse(all_gather_json(world, "backend memory/watched", problem))
        except BaseException:
            if not problem:
                self._barrier.close()
            raise

    def agree(self, call: str, row: Sequence[int], seconds: float) -> list[tuple[int, ...]]:
        """See `GroupExchange`. Without a row, calls are compared at the first barrier of the data."""
        text = call.encode()[: TEXT_BYTES - 1]
        self._call, self._word = call, _word(text)
        self._barrier.timeout_seconds = seconds
        self._said = 1 - self._said
        self._is_agreed = False
        places = self._says[self._said]
        places[self.rank][: len(text) + 1] = text + b"\0"
        if not row:
            return []
        numbers = struct.Struct(f"={len(row)}q")
        numbers.pack_into(places[self.rank], TEXT_BYTES, *row)
        self._wait()
        return [numbers.unpack_from(place, TEXT_BYTES) for place in places]

    def conclude(self) -> None:
        """See `GroupExchange`."""
        if not self._is_agreed:
            self._wait()

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """See `GroupExchange`."""
        mine = self.rank == root
        self.publish(flat if mine else None, {} if mine else {root: flat}, readers=())

    def all_gather(self, flat: torch.Tensor, outs: Sequence[torch.Tensor]) -> None:
        """See `GroupExchange`; here parts may have different lengths."""
        self.publish(flat, {rank: out for rank, out in enumerate(outs) if rank != self.rank}, readers=())

    def publish(
        self, mine: torch.Tensor | None, incoming: Mapping[int, torch.Tensor], *, readers: Sequence[int]
    ) -> None:
        """See `GroupExchange`; `readers` is of no use here: who wants to, reads."""
        length = max((part.numel() for part in (mine, *incoming.values()) if part is not None), default=0)
        for begin in range(0, length, self._half_bytes):
            end = min(length, begin + self._half_bytes)
            half = self._next_half()
            if mine is not None:
                part = mine[begin:end]
                half[self.rank][: part.numel()].copy_(part)
            self._wait()
            for rank, into in incoming.items():
                part = into[begin:end]
                part.copy_(half[rank][: part.numel()])

    def swap(
        self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor], longest: int
    ) -> None:
        """See `GroupExchange`. A half holds one piece for every rank."""
        room = self._room()
        for begin in range(0, longest, room):
            half = self._next_half()
            for rank, piece in outgoing.items():
                part = piece[begin : begin + room]
                half[self.rank][rank * room : rank * room + part.numel()].copy_(part)
            self._wait()
            for rank, into in incoming.items():
                part = into[begin : begin + room]
                part.copy_(half[rank][self.rank * room : self.rank * room + part.numel()])

    def all_reduce(self, flat: torch.Tensor, operation: str) -> None:
        """See `GroupExchange`."""
        step = self._half_bytes // flat.itemsize
        small = self.size == 2 or flat.nbytes <= 16 * 1024
        for begin in range(0, flat.numel(), step):
            part = flat[begin : begin + step]
            half = self._enter(part)
            if small:
                combine(part, [_typed(row, part) for row in half], operation)
            else:
                self._reduce_slices(part, half, operation)

    def reduce_scatter(self, out: torch.Tensor, pieces: Sequence[torch.Tensor], operation: str) -> None:
        """See `GroupExchange`; here pieces may be shorter than the first, and `out` float32 for narrow floats."""
        room = self._room()
        step = room // out.itemsize
        mine = pieces[self.rank]
        for begin in range(0, pieces[0].numel(), step):
            half = self._next_half()
            for rank, piece in enumerate(pieces):
                part = piece[begin : begin + step]
                _typed(half[self.rank][rank * room :], part).copy_(part)
            self._wait()
            part = mine[begin : begin + step]
            if part.numel():
                rows = [_typed(row[self.rank * room :], part) for row in half]
                combine(out[begin : begin + step], rows, operation)

    def serve_while_waiting(self, meanwhile: Callable[[], bool]) -> None:
        """Have `meanwhile` called while this rank waits for others of its host; see `HostBarrier.meanwhile`."""
        self._barrier.meanwhile = meanwhile

    def close(self) -> None:
        """Leave: ranks that wait for this one raise `PeerLost`. May be called by another thread, and twice."""
        self._barrier.close()

    def _reduce_slices(self, part: torch.Tensor, half: Sequence[torch.Tensor], operation: str) -> None:
        """Combine my slice of `part`, of which all ranks' are in `half`, and collect the slices of the others."""
        count = part.numel()
        line = ALIGNMENT // part.itemsize
        length = -(-count // (self.size * line)) * line
        bounds = [(min(i * length, count), min((i + 1) * length, count)) for i in range(self.size)]
        begin, end = bounds[self.rank]
        results = self._next_half()
        if end > begin:
            mine = part[begin:end]
            combine(mine, [_typed(row, part)[begin:end] for row in half], operation)
            _typed(results[self.rank], mine).copy_(mine)
        self._wait()
        for rank, (begin, end) in enumerate(bounds):
            if rank != self.rank and end > begin:
                part[begin:end].copy_(_typed(results[rank], part[begin:end]))

    def _enter(self, part: torch.Tensor) -> list[torch.Tensor]:
        half = self._next_half()
        _typed(half[self.rank], part).copy_(part)
        self._wait()
        return half

    def _room(self) -> int:
        """Return the bytes of a half that one rank's piece may take."""
        return self._half_bytes // self.size // ALIGNMENT * ALIGNMENT

    def _next_half(self) -> list[torch.Tensor]:
        """See [Note: two halves]."""
        self._turn = 1 - self._turn
        return self._halves[self._turn]

    def _wait(self) -> None:
        try:
            self._barrier.wait(self._word, self._name)
            self._is_agreed = True
        except Mismatch:
            calls = [_text(place) for place in self._says[self._said]]
            # The barrier compares words; the texts say more, where all have written theirs.
            problem = differing(self.rank, calls, self._names)
            if problem is not None:
                raise problem from None
            raise

    def _name(self, word: int) -> str:
        return self._call if word == self._word else "another call"


def _plain(memory: torch.Tensor) -> memoryview:
    """Return the bytes to read and write them without tensors, which costs a tenth."""
    array: Any = memory.numpy()
    return memoryview(array)


def _text(place: memoryview) -> str:
    return bytes(place[:TEXT_BYTES]).partition(b"\0")[0].decode(errors="replace")


def _word(call: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(call, digest_size=7).digest(), "little")


def _typed(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return memory[: like.nbytes].view(like.dtype)


# Collectives among hosts with several ranks each: what is long meets in shared memory inside each host first.
#
# With G ranks a host each local rank carries 1/G across, to the ranks of other hosts with its local number: those
# of its column. A host's link then carries what one rank a host would have to send, where ranks that talk to all
# others directly send G times as much. Calls are compared among all ranks, and small collectives are one round
# among all, as in `message_exchange`.
#
# [Note: chunks] What is long is cut into chunks: what a host has added up of one is on its way while the host adds
# up the next one.
#
# [Note: served while inside] A rank that waits inside its host goes on serving its connections: ranks of other
# hosts may wait for it, and keep those waiting that it waits for.
#
# [Note: who was first] A rank that meets an error leaves its host's memory and tells all ranks why. Those of its
# host that wait for it there look for that reason, so that all name the rank that failed first.


DIRECT_BYTES = 64 * 1024
"""Up to here all ranks exchange with each other directly: fewer steps."""
CHUNK_BYTES = 4 * 2**20
"""See [Note: chunks]."""
_REASON_SECONDS = 1.0
"""See [Note: who was first]."""


class ByHostExchange(MessageExchange):
    """See `collectives.GroupExchange`."""

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
