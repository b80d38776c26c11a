"""Ranks that stand still: stopped by a signal (SIGSTOP) on a host that lives.

[Note: whose time counts] A watcher that was itself stopped or not scheduled has seen nothing meanwhile, so
each look adds at most a little time. A job that is suspended as a whole and goes on later, launcher or
ranks first, has no frozen rank. A process that a debugger holds is in another state (t) and is left alone.

[Note: late is not dead] On a starved machine signs come late: the sender did not run, or the listener did not.
Either shows as a longer pause between two of them, and pauses grow before they become very long. So the limit
is the promised one or three times the longest recent pause, whichever is more, up to a bound. Where nothing comes
late nothing changes.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...core.vocabulary.run_files import Crash

# How long to wait for the next heartbeat of a peer before it counts as dead.

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


LOOK_SECONDS = 0.2
_MOST_SEEN_SECONDS = 2 * LOOK_SECONDS
FROZEN_KIND = "Frozen"
"""Kind of the report that a supervisor writes for a stopped rank."""
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "ash", "fish", "busybox"})
_MOST_SHELLS = 4


@dataclass
class FrozenWatch:
    """Looks at ranks' processes from time to time."""

    limit_seconds: float
    """How long a rank may be stopped; 0: for ever."""
    _seen: dict[int, float] = field(default_factory=dict)
    """For how long each stopped rank was seen so."""
    _first: dict[int, float] = field(default_factory=dict)
    _looked: float = 0.0

    def look(self, now: float, processes: Mapping[int, int]) -> list[Crash]:
        """Return accounts of ranks among `processes` (numbers by rank) that were stopped longer than the limit.

        Their time is that of the first look that found them stopped; by `time.monotonic()`, as `now`.
        """
        passed = now - self._looked
        if not self.limit_seconds or passed < LOOK_SECONDS:
            return []
        self._looked = now
        found = []
        for rank, started in processes.items():
            process = behind_shells(started)
            if state_of(process) != "T":
                self._seen.pop(rank, None)
                self._first.pop(rank, None)
                continue
            self._first.setdefault(rank, now)
            # At the first look nothing is known of the time before.
            seen = self._seen[rank] + min(passed, _MOST_SEEN_SECONDS) if rank in self._seen else 0.0
            self._seen[rank] = seen
            if seen >= self.limit_seconds:
                cause = f"stopped by a signal ({signal.SIGSTOP.name} or its like) for {self.limit_seconds:g} s"
                found.append(
                    Crash(
                        rank, socket.gethostname(), None, FROZEN_KIND, cause, "", consequence=False, exit_code=1,
                        when_seconds=self._first[rank],
                    )
                )  # fmt: skip
        return found


def stat_of(process: int | str) -> list[str]:
    """Return what proc(5) says of a process from its state on; empty when it is gone."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # The name in parentheses may hold anything.
    return text.rpartition(") ")[2].split()


def state_of(process: int | str) -> str:
    """Return the letter of a process's state; empty when it is gone."""
    return "".join(stat_of(process)[:1])


def behind_shells(process: int) -> int:
    """Return the program that a shell script waits for; `process` itself when it is no shell."""
    for _ in range(_MOST_SHELLS):
        try:
            name = Path(f"/proc/{process}/comm").read_text(encoding="utf-8", errors="replace").strip()
            if name not in _SHELLS:
                break
            children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        except OSError:
            break
        if len(children) != 1:
            break
        process = int(children[0])
    return process
