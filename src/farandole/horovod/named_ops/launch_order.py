"""From "all members are ready" to "it begins": rank 0 decides the order of large operations.

The lowest rank that takes part tells rank 0; rank 0 puts everything in one order and says what begins; every
rank begins its part of that order. A rank may be told to begin before it has heard itself that all are ready:
then it waits for that, and nothing later begins before.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .channel import Frame
from .matcher import Key
from .operations import Operation

Send = Callable[[int, Frame, bytes], None]
"""Takes rank, type and bytes."""
Begin = Callable[[int, Sequence[Operation]], None]


class LaunchOrder:
    """Large operations of one rank that have not begun. Called with the engine's lock held."""

    def __init__(self, rank: int, fusion_bytes: int, send: Send, begin: Begin) -> None:
        self._rank = rank
        self._send = send
        self._begin = begin
        self._coordinator = Coordinator(fusion_bytes) if rank == 0 else None
        self._ready: dict[Key, deque[Operation]] = {}
        self._released: deque[tuple[int, list[Key]]] = deque()

    def ready(self, operations: Sequence[Operation]) -> None:
        """All members of these are ready: a group, or one alone. Those of a group that are alike run together."""
        for operation in operations:
            self._ready.setdefault(operation.signature.key, deque()).append(operation)
        if operations[0].present[0] == self._rank:
            for unit in _units(operations):
                if self._coordinator is not None:
                    self._coordinator.ready(unit)
                else:
                    told = [unit.keys, unit.ranks, unit.kind_text, unit.nbytes, unit.fuses]
                    self._send(0, Frame.UNIT, json.dumps(told).encode())

    def take_unit(self, data: bytes) -> None:
        """On rank 0: operations of another rank are ready."""
        keys, ranks, kind_text, nbytes, fuses = json.loads(data)
        assert self._coordinator is not None, "units are sent to rank 0"
        self._coordinator.ready(ReadyGroup(_keys(keys), tuple(ranks), kind_text, nbytes, fuses))

    def take_release(self, data: bytes) -> None:
        """Rank 0 says what begins."""
        number, keys = json.loads(data)
        self._released.append((number, list(_keys(keys))))

    def ended(self, number: int, first_rank: int) -> None:
        """This rank's part of a batch is over."""
        if self._coordinator is not None:
            if first_rank == self._rank:
                self._coordinator.done(number)
        elif first_rank == self._rank:
            self._send(0, Frame.DONE, json.dumps(number).encode())

    def take_done(self, data: bytes) -> None:
        """On rank 0: the batch of another rank is over."""
        assert self._coordinator is not None, "this is sent to rank 0"
        self._coordinator.done(json.loads(data))

    def advance(self) -> None:
        """Release and begin what can be."""
        if self._coordinator is not None:
            for batch in self._coordinator.release():
                self._announce(batch)
        while self._released:
            number, keys = self._released[0]
            if not all(self._ready.get(key) for key in keys):
                return
            self._released.popleft()
            operations = [self._take(key) for key in keys]
            self._begin(number, operations)

    def waiting(self) -> list[Operation]:
        """Return the operations that all members are ready for and that have not begun."""
        return [operation for queue in self._ready.values() for operation in queue]

    def _announce(self, batch: Batch) -> None:
        data = json.dumps([batch.number, batch.keys]).encode()
        for rank in batch.ranks:
            if rank == self._rank:
                self._released.append((batch.number, batch.keys))
            else:
                self._send(rank, Frame.RELEASE, data)

    def _take(self, key: Key) -> Operation:
        queue = self._ready[key]
        operation = queue.popleft()
        if not queue:
            del self._ready[key]
        return operation


def _units(operations: Sequence[Operation]) -> list[ReadyGroup]:
    """Return what may travel in one batch: operations that are alike; what does not fuse is alone."""
    alike: dict[str, list[Operation]] = {}
    for operation in operations:
        alike.setdefault(_kind_text(operation), []).append(operation)
    units = []
    for kind_text, members in alike.items():
        fuses = _fuses(members[0])
        for part in [members] if fuses else [[each] for each in members]:
            keys = tuple(operation.signature.key for operation in part)
            nbytes = sum(operation.signature.nbytes for operation in part)
            units.append(ReadyGroup(keys, part[0].present, kind_text, nbytes, fuses))
    return units


def _kind_text(operation: Operation) -> str:
    signature = operation.signature
    about: list[Any] = [signature.process_set, signature.kind, signature.device, _fuses(operation)]
    if signature.kind == "allreduce":
        about += [signature.dtype, signature.reduction, signature.prescale, signature.postscale, operation.absent]
    return json.dumps(about)


def _fuses(operation: Operation) -> bool:
    signature = operation.signature
    return signature.kind != "allreduce" or (signature.is_exact and signature.reduction != "adasum")


def _keys(told: Any) -> tuple[Key, ...]:
    return tuple((int(serial), str(name)) for serial, name in told)


# In which order large operations run, and which of them together. Pure: no sockets, no clock; on rank 0 alone.
#
# The order is one for the whole job, so that sets which overlap cannot wait for each other crosswise. What is
# ready while earlier batches are on their way is collected, and then travels together: the busier the network, the
# larger the batches.


IN_FLIGHT = 2
"""Batches of one set of ranks that are on their way at once: one moves, the next is packed."""


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """An operation, or a group of them, that all its present members are ready for."""

    keys: tuple[Key, ...]
    ranks: tuple[int, ...]
    """Who takes part, ascending. The first one reports for all."""
    kind_text: str
    """What may travel together has the same."""
    nbytes: int
    fuses: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """Units that travel together."""

    number: int
    units: tuple[ReadyGroup, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Who takes part."""
        return self.units[0].ranks

    @property
    def keys(self) -> list[Key]:
        """All operations, in the order in which they are packed."""
        return [key for unit in self.units for key in unit.keys]


class Coordinator:
    """Takes units that are ready, gives out batches."""

    def __init__(self, fusion_bytes: int) -> None:
        self.fusion_bytes = fusion_bytes
        self._ready: list[ReadyGroup] = []
        self._on_their_way: dict[int, tuple[int, ...]] = {}
        self._next = 0

    def ready(self, unit: ReadyGroup) -> None:
        """Note that all who take part in `unit` are ready."""
        self._ready.append(unit)

    def done(self, number: int) -> None:
        """Note that a batch has ended."""
        self._on_their_way.pop(number, None)

    def release(self) -> Sequence[Batch]:
        """Return the batches that are to begin now, in their order."""
        released = []
        busy: dict[tuple[int, ...], int] = {}
        for ranks in self._on_their_way.values():
            busy[ranks] = busy.get(ranks, 0) + 1
        left: list[ReadyGroup] = []
        waiting = self._ready
        while waiting:
            first = waiting[0]
            if busy.get(first.ranks, 0) >= IN_FLIGHT:
                left += [unit for unit in waiting if unit.ranks == first.ranks]
                waiting = [unit for unit in waiting if unit.ranks != first.ranks]
                continue
            chosen, waiting = self._together(waiting)
            batch = Batch(self._next, tuple(chosen))
            self._next += 1
            self._on_their_way[batch.number] = first.ranks
            busy[first.ranks] = busy.get(first.ranks, 0) + 1
            released.append(batch)
        self._ready = left
        return released

    def _together(self, waiting: list[ReadyGroup]) -> tuple[list[ReadyGroup], list[ReadyGroup]]:
        """Return the first unit with all that can travel along, and the others."""
        first = waiting[0]
        chosen, others, nbytes = [first], [], first.nbytes
        for unit in waiting[1:]:
            same = first.fuses and unit.fuses and (unit.ranks, unit.kind_text) == (first.ranks, first.kind_text)
            if same and nbytes + unit.nbytes <= self.fusion_bytes:
                chosen.append(unit)
                nbytes += unit.nbytes
            else:
                others.append(unit)
        return chosen, others
