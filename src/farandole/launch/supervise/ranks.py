"""The ranks of one host: starting them, reading their pipes, noting how each ended, leaving none behind.

What is done about a failure is the job's business: `local` decides for the ranks of this machine, `ssh.job`
for those of many hosts, whose `ssh.agent` has one of these.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from ...core.vocabulary.run_files import JobLock, is_dispensable
from ..job.contract import JobSpec, RankSpec, rank_environment
from .failure import Exit
from .process import RankProcess, Reaper, start_rank
from .stacks import StackTaker
from .stopped_process import FrozenWatch

if TYPE_CHECKING:
    from ...core.failures import Position


class Sink(Protocol):
    """Takes what the ranks print."""

    def feed(self, rank: int, is_error: bool, data: bytes, /) -> None:
        """Take what a rank wrote."""

    def finish(self, rank: int, *, failed: bool) -> str:
        """The rank ended; return what it wrote last to stderr, when that was a traceback."""


@dataclass(frozen=True)
class PassOn:
    """A `Sink` that passes output on as it comes and holds none: the launcher holds tracebacks back."""

    feed: Callable[[int, bool, bytes], None]

    def finish(self, rank: int, *, failed: bool) -> str:
        """Return nothing: nothing is held."""
        return ""


@dataclass(eq=False)
class HostRanks:
    """Processes of one host, inside the loop of their owner."""

    command: Sequence[str]
    places: Sequence[RankSpec]
    job: JobSpec
    output: Sink
    environment: Mapping[str, str]
    reaper: Reaper | None = None
    """What ends the ranks if this process is killed; to be set before any is started."""
    on_exit: Callable[[Exit], None] = lambda ended: None
    """Called when a rank has ended."""
    exits: list[Exit] = field(init=False, default_factory=list)
    _selector: selectors.EpollSelector = field(init=False, default_factory=selectors.EpollSelector)
    _running: dict[int, RankProcess] = field(init=False, default_factory=dict)
    _stopping: bool = field(init=False, default=False)
    """Whether ranks that end from now on end because of us."""

    def __post_init__(self) -> None:
        self._frozen: set[int] = set()
        self._frozen_watch = FrozenWatch(self.job.frozen_seconds)
        self._stack_taker = StackTaker(self.job.run_directory)
        self._lock = JobLock(self.job.run_directory)

    def processes(self) -> dict[int, int]:
        """Return the process of each rank that runs."""
        return {rank: process.popen.pid for rank, process in self._running.items()}

    def note_positions(self) -> list[Position]:
        """Return where ranks stand that do no steps; have the stacks taken of those that cannot say it."""
        from ...core.failures import read_positions

        found = read_positions(self.job.run_directory)
        if found:
            self.take_stacks({position.rank for position in found})
        return found

    def take_stacks(self, known: Collection[int] = ()) -> None:
        """Have the stacks of all ranks but `known` written into the run directory."""
        self._stack_taker.take({rank: each for rank, each in self.processes().items() if rank not in known})

    def fileno(self) -> int:
        """Return a descriptor that is readable when `poll` has something to do."""
        return self._selector.fileno()

    def poll(self) -> None:
        """Deal with what ranks have printed, and with those that have ended."""
        for key, _ in self._selector.select(0):
            self._rank_event(key)

    def tick(self, now: float) -> None:
        """Do what is due; leave an account of a rank that stands still: it cannot leave one itself."""
        assert self.reaper is not None, "set before ranks are started"
        self.reaper.mind()
        if self._stopping:
            return
        running = {rank: process for rank, process in self.processes().items() if rank not in self._frozen}
        for found in self._frozen_watch.look(now, running):
            replace(found, host=self._running[found.rank].host).write(self.job.run_directory)
            self._frozen.add(found.rank)
            self._is_frozen(found.rank)

    def _is_frozen(self, rank: int) -> None:
        """Do what is to be done at once about a rank that stands still."""

    def start_rank(self, place: RankSpec) -> None:
        """Start a rank; raise `LaunchError` when it cannot be."""
        environment = {**self.environment, **rank_environment(place, self.job, self.environment)}
        has_terminal = place.size == 1 and os.isatty(0)
        words = (place.rank, self.command, environment, place.cores, place.host)
        self._follow(start_rank(*words, has_terminal=has_terminal))

    def _follow(self, process: RankProcess) -> None:
        assert self.reaper is not None, "set before ranks are started"
        self.reaper.watch(process.process_group)
        self._running[process.rank] = process
        for pipe, is_error in process.pipes:
            self._selector.register(pipe, selectors.EVENT_READ, (process, is_error))
        self._selector.register(process.pidfd, selectors.EVENT_READ, (process, None))

    def _rank_event(self, key: selectors.SelectorKey) -> None:
        """Deal with what the selector says of a rank: output, or its end."""
        process, is_error = key.data
        if process.rank not in self._running:
            return  # its end was in this very batch of events, and its pipes are closed
        if is_error is None:
            self._ended(process)
        elif not self._read(process, is_error, key.fileobj):
            self._selector.unregister(key.fileobj)

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
        # What the rank started must not keep its pipes open, nor outlive it.
        code = self._end(process)
        when = time.monotonic()
        for pipe, is_error in process.pipes:
            if pipe in self._selector.get_map():
                self._drain(process, is_error, pipe)
                self._selector.unregister(pipe)
        self._selector.unregister(process.pidfd)
        held = self.output.finish(process.rank, failed=code != 0)
        is_missed = not is_dispensable(self.job.run_directory, process.rank)
        self.exits.append(Exit(process.rank, code, when, self._stopping, held, is_missed, process.host))
        process.close()
        del self._running[process.rank]
        self.on_exit(self.exits[-1])

    def _end(self, process: RankProcess) -> int:
        """Kill a rank's group and forget it; return the rank's exit code. See [Note: whose number it is]."""
        process.signal(signal.SIGKILL)
        if self.reaper is not None:
            self.reaper.forget(process.process_group)
        return process.popen.wait()

    def _drain(self, process: RankProcess, is_error: bool, pipe: Any) -> None:
        with suppress(OSError):
            while data := os.read(pipe.fileno(), 1 << 16):
                self.output.feed(process.rank, is_error, data)

    def stop(self, number: int) -> None:
        """Send a signal to all ranks; but for SIGUSR1, a warning, they end because of us from now on."""
        self._stopping = self._stopping or number != signal.SIGUSR1
        for rank, process in self._running.items():
            # One that stands still hears nothing but this.
            is_deaf = number == signal.SIGTERM and rank in self._frozen
            process.signal(signal.SIGKILL if is_deaf else number)

    def close(self) -> None:
        """Kill what runs."""
        for process in list(self._running.values()):
            self._end(process)
            process.close()
        self._running.clear()
        self._stack_taker.close()
        self._lock.close()
        self._selector.close()
