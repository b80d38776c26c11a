"""The supervisor of a job on this machine: starts the ranks, shows what they print, stops them all when one fails.

How a job ends is told in `job_loop`; what is done for each process in `ranks`.
"""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...core.host.process_status import raise_descriptor_limit
from ...core.vocabulary.run_files import Crash, events_path, read_crashes, stacks_path
from ...core.vocabulary.text import name_ranks
from ..job.contract import JobSpec, RankSpec
from ..job.placement import is_in_use
from ..output import Output
from .failure import Exit, Failure, account_of_leaving, find_failure, out_of_memory_kills
from .job_loop import FixedJob, Outcome
from .process import Reaper
from .ranks import HostRanks
from .stopped_process import stat_of

MEETING_POLL_SECONDS = 0.5
"""How often to look whether the ranks have met, until they have."""
CRASH_POLL_SECONDS = 0.1
"""How often to look for the account of a crash: a dying rank leaves it long before its process is gone."""


class Supervisor(FixedJob):
    """Runs one command as the ranks in `places`."""

    def __init__(
        self, command: Sequence[str], places: Sequence[RankSpec], job: JobSpec, output: Output,
        environment: Mapping[str, str], *, status: Callable[[], str | None] = lambda: None,
    ) -> None:  # fmt: skip
        super().__init__(output, job, status)
        raise_descriptor_limit()
        self.ranks = HostRanks(command, places, job, output, environment)
        self._exits = self.ranks.exits
        self._directory = job.run_directory
        self._leavers = LeaverWatch(job.run_directory)
        self._next_look = 0.0
        self._port = job.port
        self._has_met = False
        self._next_look_for_meeting = 0.0

    def _begin(self, at_end: ExitStack) -> None:
        self._kills_before = out_of_memory_kills()
        self.ranks.reaper = Reaper(say=self.say)
        at_end.callback(self.ranks.reaper.dismiss)
        at_end.callback(self.ranks.close)
        self._selector.register(self.ranks, selectors.EVENT_READ, self.ranks.poll)
        for place in self.ranks.places:
            self.ranks.start_rank(place)

    def _goes_on(self) -> bool:
        return bool(self.ranks.processes())

    def _decide(self, now: float) -> None:
        self.ranks.tick(now)
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
            account_of_leaving(left, who_waits=who).write(self._directory)
        else:
            self.say(found.to_text())

    def _look_for_meeting(self, now: float) -> None:
        """See whether ranks meet at the job's port, as `fd.init` and torch.distributed do."""
        if self._has_met or now < self._next_look_for_meeting:
            return
        self._next_look_for_meeting = now + MEETING_POLL_SECONDS
        self._has_met = any(is_in_use(self._port, process) for process in self.ranks.processes().values())

    def _outcome(self, seconds: float) -> Outcome:
        return replace(super()._outcome(seconds), has_met=self._has_met or is_in_use(self._port))

    def _crashes(self) -> Sequence[Crash]:
        return read_crashes(self._directory)

    def _take_stacks(self) -> None:
        self.ranks.take_stacks()

    def _has_failed(self, now: float) -> bool:
        if super()._has_failed(now):
            return True
        if now < self._next_look:
            return False
        self._next_look = now + CRASH_POLL_SECONDS
        return any(not crash.consequence for crash in self._crashes())

    def _find_failure(self, stop_seconds: float) -> Failure | None:
        if self._failed_at is None:
            return None
        return find_failure(
            self._judged() or self._exits, self._crashes(), host=socket.gethostname(), stop_seconds=stop_seconds,
            out_of_memory=out_of_memory_kills() > self._kills_before,
        )  # fmt: skip

    def _before_signals(self) -> None:
        self._positions = {position.rank: position for position in self.ranks.note_positions()}

    def _signal_ranks(self, number: int) -> None:
        self.ranks.stop(number)


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
