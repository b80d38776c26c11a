"""Sets of ranks by number. Changed on all ranks by the same operations in the same order, so always alike."""

from __future__ import annotations

from dataclasses import dataclass

from .request import EVERYBODY


@dataclass(frozen=True, slots=True)
class RankSet:
    """Ranks, ascending. `serial` is never used again, `number` is when the set has been removed."""

    number: int
    serial: int
    ranks: tuple[int, ...]


class ProcessSets:
    """All sets of a job."""

    def __init__(self, size: int) -> None:
        self.by_number = {EVERYBODY: RankSet(EVERYBODY, 0, tuple(range(size)))}
        self._next_serial = 1

    def add(self, ranks: tuple[int, ...]) -> int:
        """Add a set; return its number, the lowest free."""
        number = next(n for n in range(len(self.by_number) + 1) if n not in self.by_number)
        self.by_number[number] = RankSet(number, self._next_serial, ranks)
        self._next_serial += 1
        return number

    def remove(self, number: int) -> RankSet | None:
        """Remove a set and return it; None for the global set and one that does not exist."""
        return None if number == EVERYBODY else self.by_number.pop(number, None)
