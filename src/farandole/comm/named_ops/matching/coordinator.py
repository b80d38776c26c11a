"""In which order large operations run, and which of them together. Pure: no sockets, no clock; on rank 0 alone.

The order is one for the whole job, so that sets which overlap cannot wait for each other crosswise. What is
ready while earlier batches are on their way is collected, and then travels together: the busier the network,
the larger the batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .matcher import Key

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
