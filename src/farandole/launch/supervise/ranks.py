"""The ranks of one host: starting them, reading their pipes, noting how each ended, leaving none behind.

What is done about a failure is the job's business. The launcher has one of these for this machine, and the
agent of each other host has one.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.host.process_status import raise_descriptor_limit
from ...core.vocabulary.run_files import Crash, JobLock, events_path, is_dispensable, read_crashes, stacks_path
from ...core.vocabulary.text import name_ranks
from ..job.contract import JobSpec, RankSpec, rank_environment
from ..job.placement import is_in_use
from ..output import Output
from .failure import Exit, account_of_leaving, out_of_memory_kills
from .job_loop import FixedJob, Outcome, Reports
from .process import RankProcess, Reaper, start_rank
from .stacks import StackTaker
from .stopped_process import FrozenWatch, stat_of

if TYPE_CHECKING:
    from ...core.failures import Position

CRASH_POLL_SECONDS = 0.1
"""How often to look for the account of a crash: a dying rank leaves it long before its process is gone."""


@dataclass(eq=False)
class HostRanks:
    """Processes of one host, inside the loop of their owner: the `JobHost` of this machine."""

    command: Sequence[str]
    job: JobSpec
    environment: Mapping[str, str]
    reports: Reports
    reaper: Reaper | None = None
    """What ends the ranks if this process is killed; to be set before any is started."""
    _selector: selectors.EpollSelector = field(init=False, default_factory=selectors.EpollSelector)
    _running: dict[int, RankProcess] = field(init=False, default_factory=dict)
    _stopping: bool = field(init=False, default=False)
    """Whether ranks that end from now on end because of us."""

    def __post_init__(self) -> None:
        self._frozen: set[int] = set()
        self._frozen_watch = FrozenWatch(self.job.frozen_seconds)
        self._stack_taker = StackTaker(self.job.run_directory)
        self._lock = JobLock(self.job.run_directory)
        self._kills_before = out_of_memory_kills()
        self._told: set[int] = set()
        """Ranks whose crash was reported."""
        self._next_look = 0.0

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
        """Have the stacks of all ranks but `known` written into the run directory. Nothing of it waits."""
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
        if now >= self._next_look:
            self._next_look = now + CRASH_POLL_SECONDS
            self._tell_crashes(self._running)
        if self._stopping:
            return
        running = {rank: process for rank, process in self.processes().items() if rank not in self._frozen}
        for found in self._frozen_watch.look(now, running):
            account = replace(found, host=self._running[found.rank].host)
            account.write(self.job.run_directory)
            self._frozen.add(found.rank)
            self._tell(account)
            self._is_frozen(found.rank)

    def _is_frozen(self, rank: int) -> None:
        """Do what is to be done at once about a rank that stands still."""

    def _tell_crashes(self, ranks: Collection[int]) -> None:
        """Report new accounts that `ranks` have left."""
        for crash in read_crashes(self.job.run_directory):
            if crash.rank in ranks:
                self._tell(crash)

    def _tell(self, crash: Crash) -> None:
        """Report an account; the first of a rank stays."""
        if crash.rank not in self._told:
            self._told.add(crash.rank)
            self.reports.crashed(crash)

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
            self.reports.printed(process.rank, is_error, data)
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
        process.close()
        del self._running[process.rank]
        self._tell_crashes({process.rank})  # its account goes first: it may explain the end
        self.reports.ended(
            Exit(
                process.rank, code, when, self._stopping, host=process.host,
                is_missed=not is_dispensable(self.job.run_directory, process.rank),
                is_out_of_memory=out_of_memory_kills() > self._kills_before,
            )
        )  # fmt: skip

    def _end(self, process: RankProcess) -> int:
        """Kill a rank's group and forget it; return the rank's exit code. See [Note: whose number it is]."""
        process.signal(signal.SIGKILL)
        if self.reaper is not None:
            self.reaper.forget(process.process_group)
        return process.popen.wait()

    def _drain(self, process: RankProcess, is_error: bool, pipe: Any) -> None:
        with suppress(OSError):
            while data := os.read(pipe.fileno(), 1 << 16):
                self.reports.printed(process.rank, is_error, data)

    def stop(self, number: int) -> None:
        """Send a signal to all ranks; but for SIGUSR1, a warning, they end because of us from now on."""
        self._stopping = self._stopping or number != signal.SIGUSR1
        for rank, process in self._running.items():
            # One that stands still hears nothing but this.
            is_deaf = number == signal.SIGTERM and rank in self._frozen
            process.signal(signal.SIGKILL if is_deaf else number)

    def leave(self) -> bool:
        """Return True: nothing has to be brought from here."""
        return True

    def close(self) -> None:
        """Kill what runs."""
        for process in list(self._running.values()):
            self._end(process)
            process.close()
        self._running.clear()
        self._stack_taker.close()
        self._lock.close()
        self._selector.close()


MEETING_POLL_SECONDS = 0.5
"""How often to look whether the ranks have met, until they have."""


class Supervisor(FixedJob):
    """Runs one command as the ranks in `places`, all on this machine."""

    def __init__(
        self, command: Sequence[str], places: Sequence[RankSpec], job: JobSpec, output: Output,
        environment: Mapping[str, str], *, status: Callable[[], str | None] = lambda: None,
    ) -> None:  # fmt: skip
        super().__init__(output, job, status)
        raise_descriptor_limit()
        self._places = places
        self.ranks = HostRanks(command, job, environment, self)
        self._leavers = LeaverWatch(job.run_directory)
        self._has_met = False
        self._next_look_for_meeting = 0.0

    def _begin(self, at_last: ExitStack) -> None:
        self.ranks.reaper = Reaper(say=self.say)
        at_last.callback(self.ranks.reaper.dismiss)
        self.hosts.add(self.ranks, numbers=[place.rank for place in self._places])
        for place in self._places:
            self.ranks.start_rank(place)

    def _is_late(self, now: float) -> bool:
        return False  # a process that this kernel does not end is waited for

    def _decide(self, now: float) -> None:
        if not self._stopping:
            self._look_for_leavers(now)
            self._look_for_meeting(now)
        super()._decide(now)

    def _look_for_leavers(self, now: float) -> None:
        """Say when a rank has ended well and others wait for it; leave an account when they wait in vain."""
        found = self._leavers.look(now, self._exits, self.ranks.processes())
        if found is None:
            return
        if found.is_missed:
            left = next(ended for ended in self._exits if ended.rank == found.rank)
            who = f"and {name_ranks(found.waiting)} waited for it in fd.init"
            account = account_of_leaving(left, who_waits=who)
            account.write(self._job.run_directory)
            self.crashed(account)
        else:
            self.say(found.to_text())

    def _look_for_meeting(self, now: float) -> None:
        """See whether ranks meet at the job's port, as `fd.init` and torch.distributed do."""
        if self._has_met or now < self._next_look_for_meeting:
            return
        self._next_look_for_meeting = now + MEETING_POLL_SECONDS
        self._has_met = any(is_in_use(self._job.port, process) for process in self.ranks.processes().values())

    def _outcome(self, seconds: float) -> Outcome:
        return replace(super()._outcome(seconds), has_met=self._has_met or is_in_use(self._job.port))

    def _before_signals(self) -> None:
        self.stood(self.ranks.note_positions())


# Ranks that end well while others still wait for them.
#
# To end first is no fault: rank 0 may have a checkpoint to save. It is one when the others have not met yet, which
# they never will then; and worth a word when the others do nothing any more.


LOOK_SECONDS = 0.5
MEETING_SECONDS = 2.0
"""Time to wait in `fd.init` after a rank has ended: the others may form a world without it."""
IDLE_SECONDS = 5.0
_BUSY_SHARE = 0.05
"""Fraction of a core; below it a process only waits."""


@dataclass(frozen=True)
class Left:
    """A rank that has ended well, and those that wait."""

    rank: int
    waiting: tuple[int, ...]
    is_missed: bool
    """Whether the others cannot go on without it."""

    def to_text(self) -> str:
        """Return a message about waiting ranks, while no rank has failed."""
        return (
            f"note: rank {self.rank} ended with exit code 0 before the others, and {name_ranks(self.waiting)} "
            f"did nothing for {IDLE_SECONDS:g} s: waiting for rank {self.rank}?"
        )


@dataclass
class LeaverWatch:
    """Looks, from time to time, at what the other ranks do once one has ended well."""

    run_directory: Path
    _looked: float = 0.0
    _meeting_since: float | None = None
    _idle_since: float | None = None
    _used: dict[int, float] = field(default_factory=dict)
    """CPU time of each process at the last check."""
    _has_spoken: bool = False

    def look(self, now: float, exits: Sequence[Exit], running: Mapping[int, int]) -> Left | None:
        """Return what there is to say, if anything: once that others are idle, or that they can never meet.

        `running`: process of each rank that runs.
        """
        passed = now - self._looked
        left = next((ended.rank for ended in exits if ended.left), None)
        if left is None or not running or passed < LOOK_SECONDS:
            return None
        self._looked = now
        waiting = self._meeting_without(left, running)
        self._meeting_since = None if not waiting else now if self._meeting_since is None else self._meeting_since
        if self._meeting_since is not None and now - self._meeting_since >= MEETING_SECONDS:
            return Left(left, waiting, is_missed=True)
        if self._are_busy(running, passed):
            self._idle_since = None
            return None
        self._idle_since = now if self._idle_since is None else self._idle_since
        if self._has_spoken or now - self._idle_since < IDLE_SECONDS:
            return None
        self._has_spoken = True
        return Left(left, tuple(sorted(running)), is_missed=False)

    def _meeting_without(self, left: int, running: Mapping[int, int]) -> tuple[int, ...]:
        """Return the ranks in `fd.init`, when the one that left has never been through it."""
        if events_path(self.run_directory, left).exists():
            return ()
        return tuple(
            rank
            for rank in sorted(running)
            if stacks_path(self.run_directory, rank).exists()
            and not events_path(self.run_directory, rank).exists()
        )

    def _are_busy(self, running: Mapping[int, int], passed: float) -> bool:
        used = {process: processor_seconds(process) for process in running.values()}
        spent = sum(used[process] - self._used.get(process, 0.0) for process in used)
        self._used = used
        return spent > _BUSY_SHARE * passed * len(used)


def processor_seconds(process: int) -> float:
    """Return the CPU seconds that a process has used; 0 if it is gone."""
    used = stat_of(process)[11:13]
    return sum(map(int, used)) / os.sysconf("SC_CLK_TCK")
