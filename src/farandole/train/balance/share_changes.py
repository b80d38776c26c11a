"""From which batch on one loader divides its batches in which proportion.

[Note: where shares change] A loader draws ahead of the training: for its workers, or for a loop that prefetches.
What was drawn was cut by the shares of then. So new shares begin at the first sample that no rank has drawn: ranks
tell each other how far they are, and nothing more is drawn meanwhile, by any thread. The order of the samples is
one for all ranks, and only where it is cut between them changes: every sample is still used once.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...core.step_model.sample_shares import divide_samples


@dataclass(frozen=True)
class Division:
    """A proportion in which ranks share batches."""

    speeds: tuple[float, ...]
    """Samples a second of each rank, in any unit."""
    cap: int = 0
    """The most samples of a rank; 0: no limit."""

    def counts(self, count: int) -> tuple[int, ...]:
        """Return each rank's samples of a batch of `count`."""
        return divide_samples(count, self.speeds, self.cap)


class ShareChange(NamedTuple):
    """From this sample of this iteration on, a loader divides so."""

    iteration: int
    used: int
    """Samples of the job's order before it."""
    division: Division


class ShareChanges:
    """The changes of one loader. Threads may draw while the one that trains changes the shares."""

    def __init__(self, division: Division | None) -> None:
        """`division`: from the beginning; None: equal."""
        self.iteration = 0
        """That which began last, from 1."""
        self._changes = [] if division is None else [ShareChange(0, 0, division)]
        self._drawn = (0, 0)
        """The iteration that drew last, and how far in the job's order."""
        self._lock = threading.Lock()

    def begin(self) -> int:
        """Begin an iteration; return its number."""
        with self._lock:
            self.iteration += 1
            return self.iteration

    def at(self, iteration: int, used: int) -> Division | None:
        """Return how the batch is divided that begins after `used` samples; None: equally."""
        found = None
        for change in self._changes:
            if (change.iteration, change.used) <= (iteration, used):
                found = change.division
        return found

    def draw(self, iteration: int, used: int, end: int) -> Division | None:
        """The same, of a batch that is now drawn, up to `end`: what is drawn does not change any more."""
        with self._lock:
            self._drawn = max(self._drawn, (iteration, end))
            return self.at(iteration, used)

    @contextmanager
    def held(self) -> Iterator[tuple[int, int]]:
        """Let nothing be drawn inside; yields how far this rank has drawn."""
        with self._lock:
            yield self._drawn

    def change(self, begin: tuple[int, int], division: Division) -> None:
        """Divide so from `begin`, an iteration and a place in it, which no rank has drawn. To be `held`."""
        assert begin >= self._drawn, f"drawn up to {self._drawn}, and shares are to change from {begin}"
        self._changes = [*(each for each in self._changes if each[:2] < begin), ShareChange(*begin, division)]

    # -- saved states --------------------------------------------------------------------------

    def state(self, iteration: int, used: int) -> list[list[Any]]:
        """Return, as JSON, what the rest of an iteration is divided by; at its beginning, what comes next."""
        if not used:
            return [[0, list(each.division.speeds)] for each in self._changes[-1:]]
        now = self.at(iteration, used)
        later = [each for each in self._changes if each.iteration == iteration and each.used > used]
        first = [] if now is None else [[used, list(now.speeds)]]
        return [*first, *([each.used, list(each.division.speeds)] for each in later)]

    def load(self, state: Sequence[Sequence[Any]], cap: int) -> Division:
        """Go on in the iteration that began last as `state` says; return what it ends with."""
        with self._lock:
            made = [ShareChange(self.iteration, int(used), Division(tuple(speeds), cap)) for used, speeds in state]
            self._changes = [made[0]._replace(used=0), *made[1:]]
            return made[-1].division


def is_share_state(value: Any) -> bool:
    """Return whether `value` is what `ShareChanges.state` returns, and not empty."""
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(_is_row(row) for row in value)


def _is_row(row: Any) -> bool:
    if not (isinstance(row, (list, tuple)) and len(row) == 2 and isinstance(row[1], (list, tuple)) and row[1]):
        return False
    return type(row[0]) is int and row[0] >= 0 and _are_speeds(row[1])


def _are_speeds(values: Iterable[Any]) -> bool:
    return all(isinstance(each, float) and 0 < each < math.inf for each in values)
