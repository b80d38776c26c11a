"""1F1B without a flush: batches follow each other in the pipeline (PipeDream-2BW).

Narayanan et al. 2006.09503, section 3.1. The warm-up of a batch is filled with the backward passes that the batch
before left open, so no rank waits between two batches. With batches of m micro-batches the actions of k batches
are those of 1F1B with k m micro-batches: micro-batch n is of batch n // m. What a rank does in one call of
`fd.step` begins with its first forward pass of the batch and ends before that of the next one; backward passes of
the last p - 1 - r micro-batches on rank r are then still to come. They end within the next call if m >= p - 1; the
paper has m >= p, so that two versions of the weights are enough.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..vocabulary.errors import PlanError
from .actions import BACKWARD, FORWARD, Action, Schedule
from .validate import validate

Rows = tuple[tuple[Action, ...], ...]
"""Actions by rank."""


@dataclass(frozen=True, slots=True)
class BatchesInARow:
    """The actions of batches that follow each other without a flush, one stage a rank.

    Micro-batches are counted from the first batch on. Raises `PlanError` for fewer micro-batches than ranks, and
    unless two batches in a row are a valid schedule.
    """

    ranks: int
    micro_batches: int
    """The number of them in one batch."""

    def __post_init__(self) -> None:
        if self.micro_batches < self.ranks:
            raise PlanError(
                f"plan: weight_versions = 2 with {self.micro_batches} micro-batches on {self.ranks} ranks: with "
                "fewer micro-batches than ranks two versions of the weights are not enough",
                remedy=f"set micro_batches = {self.ranks} or more",
            )
        validate(self.schedule(2))

    def batch(self, number: int) -> Rows:
        """Return what each rank does from its first forward pass of batch `number` to that of the next one."""
        begin = number * self.micro_batches
        rows = []
        for rank in range(self.ranks):
            row = []
            for each in range(begin, begin + self.micro_batches):
                row.append(Action(rank, FORWARD, each))
                if each >= self.ahead(rank):
                    row.append(Action(rank, BACKWARD, each - self.ahead(rank)))
            rows.append(tuple(row))
        return tuple(rows)

    def end(self, batches: int) -> Rows:
        """Return the backward passes that are still to come after `batches` batches."""
        last = batches * self.micro_batches
        return tuple(
            tuple(Action(rank, BACKWARD, each) for each in range(last - self.ahead(rank), last))
            for rank in range(self.ranks)
        )

    def schedule(self, batches: int) -> Schedule:
        """Return all actions of `batches` batches, from the first forward to the last backward pass."""
        parts = [*map(self.batch, range(batches)), self.end(batches)]
        rows = tuple(tuple(each for part in parts for each in part[rank]) for rank in range(self.ranks))
        return Schedule("1f1b", batches * self.micro_batches, tuple(range(self.ranks)), rows)

    def position(self, rank: int, action: Action) -> int:
        """Return a number that grows in the order of a rank's actions, however many batches follow."""
        if action.kind == FORWARD:
            return 2 * action.micro_batch
        return 2 * (action.micro_batch + self.ahead(rank)) + 1

    def ahead(self, rank: int) -> int:
        """Return the micro-batches whose backward passes are to come when `rank` begins the next batch."""
        return self.ranks - 1 - rank
