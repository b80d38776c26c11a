"""The steps of a run of any length in bounded memory: a uniform sample of rows, and sums of the rows between.

[Note: which steps are kept] Whole rows are kept until they weigh more than a budget; then every second step is
dropped, and again. A step's turn comes by a hash of its number, which is the same on all ranks and beats no
rhythm: of steps with a pause every hundred steps, the sample has its fair share. What is dropped is added to the
sums of the steps around it, so that counts of all steps stay exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ..format.downsampling import add_up, merge
from ..format.rows import StepRow, ThinnedRow

BUDGET = 400_000
"""Buckets, phases and exchanges of all ranks together that are held in memory."""
LEAST_STEPS = 64
_HASH = 2654435761


class LoggedLoss(NamedTuple):
    """The loss of a step."""

    step: int
    loss: float
    samples: int


@dataclass
class StepSample:
    """The steps of one rank, as much of them as `budget` allows."""

    budget: int | None
    """Buckets, phases and exchanges to hold. None: all."""
    steps: list[StepRow] = field(default_factory=list)
    sums: list[ThinnedRow] = field(default_factory=list)
    """Sums of the steps that are not in `steps`, in order, at most one between two of those."""
    loss_ends: list[LoggedLoss] = field(default_factory=list)
    """The first and the last loss of all steps."""
    level: int = 0
    """Steps were halved so many times."""
    _held: int = 0
    _open: bool = False
    """Whether the last of `sums` comes after the last of `steps`."""

    def wanted(self, step: int) -> bool:
        """Return whether a step will be kept whole."""
        return turn(step, self.level)

    def take(self, row: StepRow | ThinnedRow) -> None:
        """Take the next step, or sums of steps."""
        if isinstance(row, StepRow) and row.loss is not None:
            self.loss_ends[1:] = [LoggedLoss(row.step, row.loss, row.samples)]
        if isinstance(row, ThinnedRow) or not self.wanted(row.step):
            self._add(row)
            return
        self.steps.append(row)
        self._open = False
        self._held += weight(row)
        while self.budget is not None and self._held > self.budget and len(self.steps) > LEAST_STEPS:
            self._halve()

    def _add(self, row: StepRow | ThinnedRow) -> None:
        if self._open:
            last = self.sums[-1]
            self.sums[-1] = merge(last, row) if isinstance(row, ThinnedRow) else add_up(last, row)
        else:
            self.sums.append(row if isinstance(row, ThinnedRow) else add_up(None, row))
            self._open = True

    def _halve(self) -> None:
        self.level += 1
        rows: list[StepRow | ThinnedRow] = [*self.sums, *self.steps]
        rows.sort(key=lambda row: row.begin_seconds)
        self.steps.clear()
        self.sums.clear()
        self._open = False
        for row in rows:
            if isinstance(row, StepRow) and self.wanted(row.step):
                self.steps.append(row)
                self._open = False
            else:
                self._add(row)
        self._held = sum(weight(row) for row in self.steps)


def turn(step: int, level: int) -> bool:
    """Return whether a step is kept after so many halvings. See [Note: which steps are kept]."""
    return level == 0 or (step * _HASH) % 2**32 < 2 ** (32 - min(level, 32))


def weight(row: StepRow) -> int:
    """Return what a row counts of a budget."""
    return 1 + len(row.phases) + sum(1 + len(exchange.buckets) for exchange in row.exchanges)


def share_of_budget(ranks: int) -> int:
    """Return what one of so many ranks may hold."""
    return max(1, BUDGET // max(1, ranks))
