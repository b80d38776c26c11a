"""The supervisor of a job on this machine: starts the ranks, shows what they print, stops them all when one fails.

How a job ends is told in `job_loop`; what is done for each process in `ranks`.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from ...core.host.process_status import raise_descriptor_limit
from ...core.vocabulary.rank_lists import name_ranks
from ...core.vocabulary.run_files import Crash, read_crashes
from ..job.contract import JobSpec, RankSpec
from ..job.placement import is_in_use
from ..output.rank_output import Output
from .failure import Failure, account_of_leaving, find_failure, out_of_memory_kills
from .fixed_job import FixedJob
from .job_loop import Outcome
from .leavers import LeaverWatch
from .ranks import HostRanks
from .reaper import Reaper

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
