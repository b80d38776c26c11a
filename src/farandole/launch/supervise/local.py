"""The supervisor of a job on this machine: starts the ranks, shows what they print, stops them all when one fails.

How a job ends is told in `stopping`; what is done for each process in `ranks`.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ...core.vocabulary.rank_lists import name_ranks
from ...core.vocabulary.run_files import read_crashes
from ..output.rank_output import Output
from ..output.status import STATUS_SECONDS, show_status
from .failure import Failure, account_of_leaving, find_failure, is_explained, is_hang, out_of_memory_kills
from .leavers import LeaverWatch
from .ranks import HostRanks
from .reaper import Reaper
from .stacks import STACKS_SECONDS
from .stopping import SETTLE_SECONDS, UNEXPLAINED_SECONDS, SignalHandling

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
class Supervisor(HostRanks, SignalHandling):
    """Runs one command as the ranks in `places`. Use once."""

    output: Output
    status: Callable[[], str | None] = lambda: None
    _next_look: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._leavers = LeaverWatch(self.job.run_directory)

    def run(self) -> Outcome:
        """Start all ranks and return when all are gone."""
        begin = time.monotonic()
        kills_before = out_of_memory_kills()
        self._reaper = Reaper(say=self._say)
        previous = self._catch_signals()
        failed_at = None
        next_status = begin + STATUS_SECONDS
        try:
            for place in self.places:
                self._start(place)
            while self._running:
                self._poll()
                now = time.monotonic()
                self._look_for_frozen(now)
                self._look_for_leavers(now)
                self._reaper.mind()
                if failed_at is None and not self._signals and self._has_failed(now):
                    failed_at = now
                    self._stop_after(now + self._settle_seconds())
                elif failed_at is not None and self._is_explained():
                    self._stop_sooner(failed_at + SETTLE_SECONDS)
                self._send_due(now)
                if now >= next_status:
                    next_status = now + show_status(self.output, None if self._stopping else self.status())
        finally:
            self._end_all()
            self._reaper.dismiss()
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

    def _settle_seconds(self) -> float:
        """Return how long the others get before they are stopped."""
        crashes = read_crashes(self.job.run_directory)
        if is_hang(self._exits, crashes):
            self._stack_taker.take(self.rank_processes())
            return STACKS_SECONDS
        return SETTLE_SECONDS if is_explained(self._exits, crashes) else UNEXPLAINED_SECONDS

    def _is_explained(self) -> bool:
        """Return whether nothing more has to be waited for."""
        crashes = read_crashes(self.job.run_directory)
        return is_explained(self._exits, crashes) and not is_hang(self._exits, crashes)

    def _has_failed(self, now: float) -> bool:
        if any(ended.failed for ended in self._exits):
            return True
        if now < self._next_look:
            return False
        self._next_look = now + CRASH_POLL_SECONDS
        return any(not crash.consequence for crash in read_crashes(self.job.run_directory))

    def _look_for_leavers(self, now: float) -> None:
        """Say when a rank has ended well and others wait for it; leave an account when they wait in vain."""
        if self._stopping:
            return
        found = self._leavers.look(now, self._exits, self.rank_processes())
        if found is None:
            return
        if found.is_missed:
            left = next(ended for ended in self._exits if ended.rank == found.rank)
            host = socket.gethostname()
            who = f"and {name_ranks(found.waiting)} waited for it in fd.init"
            account_of_leaving(left, host, who_waits=who).write(self.job.run_directory)
        else:
            self._say(found.to_text())

    def _say(self, text: str) -> None:
        self.output.say(f"farandole: {text}")

    def _poll(self) -> None:
        for key, _ in self._selector.select(timeout=0.1):
            if key.data is None:
                self._woken()
            else:
                self._rank_event(key)
        self.output.tick()
