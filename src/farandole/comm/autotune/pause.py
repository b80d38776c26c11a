"""When a link may be measured again: as soon as steps are late, and never for more than 1 % of the run's time.

Looking costs every rank's time. So what all looks but the first took together, with the coming one, stays below
`SHARE` of the time since the first; there is a least pause between two; and looks that change nothing become
rarer: steps may be late because the model of a step is wrong, and then no look helps.
"""

from __future__ import annotations

SHARE = 0.01
"""Fraction of the time since the first measurement that all later ones may take."""
LEAST_PAUSE_SECONDS = 5.0
_REGULAR_SHARE = 0.005
"""Fraction for measurements without a reason; the rest is for steps that are late."""
_MOST_DOUBLINGS = 3
_MOST_LATE_DOUBLINGS = 6


class Pause:
    """One rank's idea of when to look again. Times of `time.monotonic`."""

    def __init__(self) -> None:
        self.next_seconds = float("inf")
        """When the next look is due without a reason."""
        self.spent_seconds = 0.0
        """For all looks but the first."""
        self._begin_seconds = float("inf")
        self._cost_seconds = 0.0
        self._late_from_seconds = float("inf")
        self._idle = self._late_idle = 0

    def is_over(self, now_seconds: float, *, late: bool) -> bool:
        """Return whether to look now; `late`: steps take longer than they should."""
        if now_seconds > self.next_seconds:
            return True
        return late and now_seconds >= max(self._late_from_seconds, self._affordable_seconds())

    def looked(
        self, began_seconds: float, ended_seconds: float, again_seconds: float, *, changed: bool, late: bool
    ) -> None:
        """Note a look, and how long the next one should take.

        `changed`: it found something new. `late`: steps were, on this rank, before it.
        """
        self._cost_seconds = again_seconds  # not this look's: the first does more, and a link may have changed
        if self._begin_seconds == float("inf"):
            self._begin_seconds = ended_seconds
        else:
            self.spent_seconds += ended_seconds - began_seconds
        self._idle = 0 if changed else min(self._idle + 1, _MOST_DOUBLINGS)
        self._late_idle = min(self._late_idle + 1, _MOST_LATE_DOUBLINGS) if late and not changed else 0
        regular = max(LEAST_PAUSE_SECONDS, self._cost_seconds / _REGULAR_SHARE) * 2**self._idle
        self.next_seconds = max(ended_seconds + regular, self._affordable_seconds())
        self._late_from_seconds = ended_seconds + LEAST_PAUSE_SECONDS * 2**self._late_idle

    def _affordable_seconds(self) -> float:
        """Return from when on one more look like the last keeps all of them below `SHARE`."""
        return self._begin_seconds + (self.spent_seconds + self._cost_seconds) / SHARE
