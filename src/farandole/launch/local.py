"""The supervisor of one host: starts the ranks, passes on what they print, stops them all when one fails.

[Note: how a job ends] All ranks ended well: exit code 0. One failed: a moment for the others' own
accounts, then SIGTERM to their groups and SIGKILL half a second later; exit code of the first cause. A
signal to the launcher is passed on, with time to end well, then SIGTERM, then SIGKILL; a second one
kills at once; exit code 128 + signal. However it ends, every process group is gone and the port is free.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from ..core.run_files import read_crashes
from .contract import Job, Place, rank_environment
from .failure import Exit, Failure, find_failure, out_of_memory_kills
from .output import Output
from .process import RankProcess, start_rank
from .reaper import Reaper

SETTLE_SECONDS = 0.15
"""After the first failure: the accounts of ranks that failed for the same reason arrive."""
CRASH_POLL_SECONDS = 0.1
"""How often to look for the account of a crash: a dying rank leaves it long before its process is gone."""
TERMINATE_SECONDS = 0.5
"""From SIGTERM to SIGKILL."""
INTERRUPT_SECONDS = 3.0
"""From a passed-on signal to SIGTERM."""
STATUS_SECONDS = 1.0
PLAIN_STATUS_SECONDS = 10.0
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Outcome:
    """How the job ended."""

    exit_code: int
    seconds: float
    """From the first start to the last end."""
    failure: Failure | None = None
    signal: int | None = None


@dataclass(eq=False)
class Supervisor:
    """Runs one command as the ranks in `places`. Use once."""

    command: Sequence[str]
    places: Sequence[Place]
    job: Job
    output: Output
    environment: Mapping[str, str]
    status: Callable[[], str | None] = lambda: None
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _running: dict[int, RankProcess] = field(default_factory=dict)
    _exits: list[Exit] = field(default_factory=list)
    _signals: list[int] = field(default_factory=list)
    _stopping: bool = False
    _deadlines: list[tuple[float, int]] = field(default_factory=list)
    """When to send which signal to all that still run."""
    _next_look: float = 0.0

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
                    self._deadlines = [
                        (now + SETTLE_SECONDS, signal.SIGTERM),
                        (now + SETTLE_SECONDS + TERMINATE_SECONDS, signal.SIGKILL),
                    ]
                self._send_due(now)
                if now >= next_status:
                    next_status = now + self._show_status()
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

    def _start(self, place: Place, reaper: Reaper) -> None:
        environment = {**self.environment, **rank_environment(place, self.job, self.environment)}
        process = start_rank(place.rank, self.command, environment, place.cores, place.host)
        reaper.watch(process.process_group)
        self._running[place.rank] = process
        for pipe, is_error in ((process.popen.stdout, False), (process.popen.stderr, True)):
            assert pipe is not None, "both are pipes"
            self._selector.register(pipe, selectors.EVENT_READ, (process, is_error))
        self._selector.register(process.pidfd, selectors.EVENT_READ, (process, None))

    def _poll(self) -> None:
        for key, _ in self._selector.select(timeout=0.1):
            if key.data is None:
                with suppress(BlockingIOError):
                    os.read(key.fd, 4096)  # a signal woke us; its handler has noted it
                continue
            process, is_error = key.data
            if process.rank not in self._running:
                continue  # its end was in this very batch of events, and its pipes are closed
            if is_error is None:
                self._ended(process)
            elif not self._read(process, is_error, key.fileobj):
                self._selector.unregister(key.fileobj)
        self.output.tick()

    def _read(self, process: RankProcess, is_error: bool, pipe: Any) -> bool:
        """Pass on what a pipe holds; return False at its end."""
        try:
            data = os.read(pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if data:
            self.output.feed(process.rank, is_error, data)
        return bool(data)

    def _ended(self, process: RankProcess) -> None:
        code = process.popen.wait()
        when = time.monotonic()
        # What the rank started must not keep its pipes open, nor outlive it.
        process.signal(signal.SIGKILL)
        for pipe, is_error in ((process.popen.stdout, False), (process.popen.stderr, True)):
            if pipe is not None and pipe in self._selector.get_map():
                self._drain(process, is_error, pipe)
                self._selector.unregister(pipe)
        self._selector.unregister(process.pidfd)
        stopped = self._stopping and code != 0
        held = self.output.finish(process.rank, failed=code != 0)
        self._exits.append(Exit(process.rank, code, when, stopped, held))
        process.close()
        del self._running[process.rank]

    def _drain(self, process: RankProcess, is_error: bool, pipe: Any) -> None:
        with suppress(OSError):
            while data := os.read(pipe.fileno(), 1 << 16):
                self.output.feed(process.rank, is_error, data)

    def _send_due(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number = self._deadlines.pop(0)
            self._stopping = True
            for process in self._running.values():
                process.signal(number)

    def _show_status(self) -> float:
        """Show the status and return the seconds until the next one."""
        text = None if self._stopping else self.status()
        if text is not None:
            self.output.status(text)
        return STATUS_SECONDS if self.output.is_live else PLAIN_STATUS_SECONDS

    def _end_all(self) -> None:
        for process in list(self._running.values()):
            process.signal(signal.SIGKILL)
            process.popen.wait()
            process.close()
        self._running.clear()
        self._selector.close()

    # -- signals ------------------------------------------------------------------------------

    def _catch_signals(self) -> dict[int, Any]:
        read_end, self._wake_end = socket.socketpair()
        self._read_end = read_end
        read_end.setblocking(False)
        self._wake_end.setblocking(False)
        self._selector.register(read_end, selectors.EVENT_READ, None)
        self._previous_wakeup = signal.set_wakeup_fd(self._wake_end.fileno())
        # One started with nohup goes on when its terminal is gone.
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
        return {number: signal.signal(number, self._signalled) for number in _PASSED_ON if number not in ignored}

    def _release_signals(self, previous: dict[int, Any]) -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        self._read_end.close()
        self._wake_end.close()

    def _signalled(self, number: int, _: FrameType | None) -> None:
        self._signals.append(number)
        now = time.monotonic()
        self._stopping = True
        if len(self._signals) > 1:
            self._deadlines = [(now, signal.SIGKILL)]
            return
        grace = now + (INTERRUPT_SECONDS if number == signal.SIGINT else 0.0)
        self._deadlines = [
            (now, number),
            (grace, signal.SIGTERM),
            (max(grace, now + INTERRUPT_SECONDS) + TERMINATE_SECONDS, signal.SIGKILL),
        ]
