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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ....core.vocabulary.errors import Mismatch
from ...transport.host_memory import ALIGNMENT, PAGE_BYTES, HostBarrier, Peer, aligned, refuse, share
from ...world.store_sync import all_gather_json
from ...world.world import World
from .exchange import TEXT_BYTES, combine, differing

HALF_BYTES = 1024 * 1024
"""Small enough for a second-level cache to hold, large enough that a barrier is cheap beside it."""


class HostExchange:
    """See `exchange.GroupExchange`. Made by all ranks of a group at once."""

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
