"""The time of a measurement, divided among phases as they begin. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

SHARES = {"compute": 0.3, "collectives": 0.35, "overlap": 0.12, "codecs": 0.11, "loader": 0.05, "disk": 0.07}
"""Parts of the time, in the order of the phases."""
LEAST_SECONDS = 1.5
"""The smallest budget: each phase makes its fewest rounds. 2 ranks on 2 cores that were given 0 s took 0.9 to 1.1
s (5 runs). Slower machines and links need more, which the job says at its end."""


class PhaseBudget:
    """Gives each phase its share of the remaining time. All ranks make it, and call it alike."""

    def __init__(
        self,
        phases: Sequence[str],
        left_seconds: float,
        *,
        agree: Callable[[float], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to count.

        Args:
            phases: those that will run, in order.
            left_seconds: for all of them.
            agree: returns what rank 0 calls it with, on all ranks.
            clock: in seconds.
        """
        self._phases, self._clock, self._agree = list(phases), clock, agree
        self._end_seconds = clock() + left_seconds

    def begin(self, phase: str) -> float:
        """Return the seconds of `phase`, which begins: the same on all ranks, 0 where no time remains.

        What earlier phases did not need is divided among the later ones, and so is what they took too long.
        """
        open_phases = self._phases[self._phases.index(phase) :]
        left = max(0.0, self._agree(self.left_seconds))
        return left * SHARES[phase] / sum(SHARES[each] for each in open_phases)

    @property
    def left_seconds(self) -> float:
        """The remaining time by this rank's clock; negative: the phases took longer than they were given."""
        return self._end_seconds - self._clock()
