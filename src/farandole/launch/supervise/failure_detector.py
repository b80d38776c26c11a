"""How long to wait for the next heartbeat of a peer before it counts as dead.

[Note: late is not dead] On a starved machine signs come late: the sender did not run, or the listener did not.
Either shows as a longer pause between two of them, and pauses grow before they become very long. So the limit
is the promised one or three times the longest recent pause, whichever is more, up to a bound. Where nothing comes
late nothing changes.
"""

from __future__ import annotations

_TIMES = 3.0
_MOST_TIMES = 5.0
"""The limit at most, in limits: whatever happens, a dead one is noticed."""
_HALF_LIFE_SECONDS = 20.0
_PAUSE_SECONDS = 1.0
"""Between two looks of our own; less is a busy machine."""
_RECENT_SECONDS = 5.0
"""For what a pause has caused to become known."""


class FailureDetector:
    """Watches one sender."""

    def __init__(self, limit_seconds: float, now: float) -> None:
        """`limit_seconds`: how long to wait when signs come in time. Times are of `time.monotonic()`."""
        self.last_heard = now
        self._promised_seconds = limit_seconds
        self._pause_seconds = 0.0
        self._has_heard = False

    def heard(self, now: float) -> None:
        """A sign of life came."""
        # How long it took to begin says nothing of what follows.
        pause = now - self.last_heard if self._has_heard else 0.0
        self._has_heard = True
        self._pause_seconds = max(pause, self._pause_seconds * 0.5 ** (pause / _HALF_LIFE_SECONDS))
        self.last_heard = now

    def reset(self, now: float) -> None:
        """Called when this process was suspended: messages that came meanwhile are still unread."""
        self.last_heard = now

    @property
    def limit_seconds(self) -> float:
        """How long to wait as things are."""
        most = _MOST_TIMES * self._promised_seconds
        return min(most, max(self._promised_seconds, _TIMES * self._pause_seconds))

    def is_over(self, now: float) -> bool:
        """Return whether to wait no longer."""
        return now - self.last_heard > self.limit_seconds


class OwnPauses:
    """When this process itself stood still: stopped, or not scheduled."""

    def __init__(self, now: float) -> None:
        """Times are of `time.monotonic()`, as in all that follows."""
        self._looked = now
        self._seconds = 0.0
        self._ended = float("-inf")

    def look(self, now: float) -> bool:
        """Return whether it stood still until now. To be called often, and first after any wait."""
        passed, self._looked = now - self._looked, now
        if passed <= _PAUSE_SECONDS:
            return False
        self._seconds, self._ended = passed, now
        return True

    def recent_seconds(self, now: float) -> float:
        """Return for how long it stood still a moment ago; 0 when it did not."""
        if now - self._looked > _PAUSE_SECONDS:
            return now - self._looked  # it has only just woken up, and has not looked yet
        return self._seconds if now - self._ended < _RECENT_SECONDS else 0.0
