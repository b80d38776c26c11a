"""How an epoch of samples is divided over ranks: pure arithmetic. See [Note: how data is divided].

>>> [part.samples for part in Partition(rank=1, size=2, whole=4, drop_last=False).parts(11)]
[2, 2, 1]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..balance import Division


@dataclass(frozen=True)
class Part:
    """One rank's part of one of the job's batches."""

    positions: range
    """Where its samples stand in the epoch's order."""
    samples: int
    """How many of them count: 0 for a placeholder."""
    factor: float
    """samples x ranks / samples of the whole batch. See [Note: the true mean]."""


@dataclass(frozen=True)
class Partition:
    """How one rank of `size` divides batches of `whole` samples."""

    rank: int
    size: int
    whole: int
    drop_last: bool = False
    is_split: bool = False
    """Whether the batch of all ranks stays the same when their number changes, and not that of each."""
    placeholders: bool = True
    """Give a rank without a sample in the last batch the epoch's first one again, so that steps stay equal."""
    division: Division | None = None
    """Unequal shares of the ranks; None: equal ones."""

    def over(self, rank: int, size: int) -> Partition:
        """Return it for another number of ranks, seen from `rank`."""
        whole = self.whole if self.is_split else self.whole // self.size * size
        return replace(self, rank=rank, size=size, whole=whole)

    @property
    def own_size(self) -> int:
        """Samples of this rank in a full batch."""
        return len(self.cut(0, self.whole))

    def cut(self, first: int, count: int) -> range:
        """Return this rank's contiguous part of `count` positions that begin at `first`."""
        if self.division is not None:
            counts = self.division.counts(count)
            begin = first + sum(counts[: self.rank])
            return range(begin, begin + counts[self.rank])
        even, rest = divmod(count, self.size)
        begin = first + self.rank * even + min(self.rank, rest)
        return range(begin, begin + even + (self.rank < rest))

    def part(self, first: int, count: int) -> Part | None:
        """Return this rank's part of the batch of `count` samples at `first`; None when it has none."""
        positions = self.cut(first, count)
        if positions:
            return Part(positions, len(positions), len(positions) * self.size / count)
        return Part(range(1), 0, 0.0) if self.placeholders else None

    def parts(self, total: int, begin: int = 0) -> Iterator[Part]:
        """Yield this rank's parts of an epoch of `total` samples, from `begin` on."""
        for first in range(begin, total, self.whole):
            count = min(self.whole, total - first)
            if count < self.whole and self.drop_last:
                return
            part = self.part(first, count)
            if part is not None:
                yield part

    def steps(self, total: int) -> int:
        """Return how many parts `parts` yields."""
        full, rest = divmod(total, self.whole)
        if not rest or self.drop_last:
            return full
        return full + (1 if self.placeholders or self.cut(0, rest) else 0)
