"""How long a training may do no step before that is strange: `MEDIANS` median steps, or the plan's seconds."""

from __future__ import annotations

import statistics
from collections import deque

MEDIANS = 20
FIRST_STEPS = 3
"""So many steps are warm-up: compiling, filling caches, starting the loader's workers."""
FIRST_TIMES = 6
"""In warm-up the limit is so many times longer."""
PAUSE_TIMES = 3
"""Ranks that wait for one at work are spoken of after so many limits."""
_KEPT = 101


class Pace:
    """The recent durations of steps, from a count that is looked at now and then."""

    def __init__(self, now: float, done: int = 0) -> None:
        self.done = done
        self.quiet_seconds = 0.0
        """Time since the last step that was noticed."""
        self._looked = now
        self._step_seconds: deque[float] = deque(maxlen=_KEPT)

    def look(self, now: float, done: int, *, most_seconds: float) -> bool:
        """Take the count of finished steps; return whether there are new ones.

        A process that was suspended has missed time, not lost it: no look adds more than `most_seconds`.
        """
        passed, self._looked = min(now - self._looked, most_seconds), now
        self.quiet_seconds += passed
        if done == self.done:
            return False
        if self.done:  # the first step says little of the others
            self._step_seconds.append(self.quiet_seconds / max(1, done - self.done))
        self.done, self.quiet_seconds = done, 0.0
        return True

    def limit_seconds(self, stall_seconds: float) -> float:
        """Return after how long a stall is one."""
        if self.done < FIRST_STEPS:
            return FIRST_TIMES * stall_seconds
        middle = statistics.median(self._step_seconds) if self._step_seconds else 0.0
        return max(stall_seconds, MEDIANS * middle)
