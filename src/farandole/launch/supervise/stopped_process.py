"""Ranks that stand still: stopped by a signal (SIGSTOP) on a host that lives.

[Note: whose time counts] A watcher that was itself stopped or not scheduled has seen nothing meanwhile, so
each look adds at most a little time. A job that is suspended as a whole and goes on later, launcher or
ranks first, has no frozen rank. A process that a debugger holds is in another state (t) and is left alone.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...core.vocabulary.run_files import Crash

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
