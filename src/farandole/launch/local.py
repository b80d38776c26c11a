"""The supervisor of a job on this machine: starts the ranks, shows what they print, stops them all when one fails.

How a job ends is told in `stopping`; what is done for each process in `ranks`.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..core.run_files import read_crashes
from .failure import Failure, find_failure, out_of_memory_kills
from .output import Output
from .ranks import HostRanks
from .reaper import Reaper
from .status import STATUS_SECONDS, show_status
from .stopping import SETTLE_SECONDS, Stoppable

CRASH_POLL_SECONDS = 0.1
"""How often to look for the account of a crash: a dying rank leaves it long before its process is gone."""


@dataclass
class Outcome:
    """How the job ended."""

    exit_code: int
    seconds: float
    """From the first start to the last end."""
    failure: Failure | None = None
    signal: int | None = None


@dataclass(eq=False)
class Supervisor(HostRanks, Stoppable):
    """Runs one command as the ranks in `places`. Use once."""

    output: Output
    status: Callable[[], str | None] = lambda: None
    _next_look: float = field(init=False, default=0.0)

    def run(self) -> Outcome:
        """Start all ranks and return when all are gone."""
        begin = time.monotonic()
        kills_before = out_of_memory_kills()
        reaper = Reaper()
        previous = self._catch_signals()
        failed_at = None
        next_status = begin + STATUS_SECONDS
        try:
            for place in self.places:
                self._start(place, reaper)
            while self._running:
                self._poll()
                now = time.monotonic()
                if failed_at is None and not self._signals and self._has_failed(now):
                    failed_at = now
                    self._stop_after(now + SETTLE_SECONDS)
                self._send_due(now)
                if now >= next_status:
                    next_status = now + show_status(self.output, None if self._stopping else self.status())
        finally:
            self._end_all()
            reaper.dismiss()
            self._release_signals(previous)
            self.output.status(None)
        ended = time.monotonic()
        if self._signals:
            return Outcome(128 + self._signals[0], ended - begin, signal=self._signals[0])
        if failed_at is None:
            return Outcome(0, ended - begin)
        failure = find_failure(
            self._exits,
            read_crashes(self.job.run_directory),
            host=socket.gethostname(),
            stop_seconds=ended - failed_at,
            out_of_memory=out_of_memory_kills() > kills_before,
        )
        return Outcome(failure.exit_code, ended - begin, failure=failure)

    def rank_processes(self) -> list[int]:
        """Return the process of each rank that runs."""
        return [process.popen.pid for process in self._running.values()]

    def _has_failed(self, now: float) -> bool:
        if any(ended.failed for ended in self._exits):
            return True
        if now < self._next_look:
            return False
        self._next_look = now + CRASH_POLL_SECONDS
        return any(not crash.consequence for crash in read_crashes(self.job.run_directory))

    def _poll(self) -> None:
        for key, _ in self._selector.select(timeout=0.1):
            if key.data is None:
                self._woken()
            else:
                self._rank_event(key)
        self.output.tick()
