"""A job of fixed ranks, wherever they run: all are stopped when one fails, once the first cause is known.

[Note: cause across hosts] A host that is lost makes the ranks of other hosts fail, within milliseconds or
much later, and the news of its loss comes last. So an exception that only tells of another rank is not
believed while a host is suspiciously silent; and a loss counts from the moment the host fell silent.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from ...core.host.process_status import raise_descriptor_limit
from ...core.vocabulary.run_files import Crash
from ...core.vocabulary.text import name_ranks
from ..job.contract import JobSpec, RankSpec
from ..job.placement import is_in_use
from ..output import Output
from .failure import (
    Exit,
    Failure,
    HostFailure,
    account_of_leaving,
    find_failure,
    find_suspects,
    is_explained,
    is_hang,
)
from .job_loop import JobLoop, Outcome
from .process import Reaper
from .ranks import HostRanks, LeaverWatch
from .stacks import STACKS_SECONDS

SETTLE_SECONDS = 0.15
"""After the first failure: the accounts of ranks that failed for the same reason arrive."""
UNEXPLAINED_SECONDS = 1.0
"""The same as long as no rank has said more than that another is gone: that one may take its time to end."""
MEETING_POLL_SECONDS = 0.5
"""How often to look whether the ranks have met, until they have."""


class FixedJob(JobLoop):
    """Decides when the ranks are stopped, and names the cause. Subclasses start them."""

    def __init__(self, output: Output, job: JobSpec, status: Callable[[], str | None] = lambda: None) -> None:
        """`status` returns the latest line of progress, None when there is none."""
        super().__init__(output, job, status)
        self._exits: list[Exit] = []
        self._losses: list[Loss] = []
        self._missed: set[int] = set()
        """Ranks that were killed, and without which the others go on."""
        self._failed_at: float | None = None

    def _has_ended(self, exited: Exit) -> None:
        self._exits.append(exited)

    def _has_lost(self, names: set[str], running: list[int], failure: HostFailure) -> None:
        when = time.monotonic() if failure.when_seconds is None else failure.when_seconds
        self._losses += [Loss(name, when, failure, tuple(sorted(running))) for name in sorted(names)]

    @property
    def _is_ending(self) -> bool:
        return bool(self._signals) or self._failed_at is not None or not self.hosts.names

    # -- deciding --------------------------------------------------------------------------------

    def _decide(self, now: float) -> None:
        if self._signals:
            return
        if self._failed_at is not None:
            if self._is_explained():
                self._stop_sooner(self._failed_at + SETTLE_SECONDS)
        elif self._has_failed(now):
            self._failed_at = now
            self.output.hide_tracebacks()  # the report has that of the cause
            self._stop_after(now + self._settle_seconds())

    def _has_failed(self, now: float) -> bool:
        if self._losses or any(not crash.consequence for crash in self._crashes.values()):
            return True
        suspects = find_suspects(self._judged(), self._accounts())
        return bool(suspects) and not (suspects[0].is_consequence and self._may_be_a_host(now))

    def _may_be_a_host(self, now: float) -> bool:
        """Return whether a host is suspiciously silent. See [Note: cause across hosts]."""
        return False

    def _judged(self) -> list[Exit]:
        """Return the ends of ranks but those that the job goes on without."""
        if self._job.outlives_ranks and self._failed_at is None and not self._stopping:
            for ended in self._exits:
                may_miss = ended.rank > 0 and not ended.is_missed and ended.rank not in self._missed
                if ended.failed and ended.code < 0 and may_miss:
                    self._missed.add(ended.rank)
                    name = signal.Signals(-ended.code).name
                    self.say(f"rank {ended.rank} was killed by {name}: the others go on without it")
        return [ended for ended in self._exits if ended.rank not in self._missed]

    def _accounts(self) -> list[Crash]:
        return list(self._crashes.values())

    def _settle_seconds(self) -> float:
        """Return how long the other ranks get before they are stopped."""
        if self._losses:
            return 0.0  # a host that was lost has no more to say, and what it took along can only fail
        if is_hang(self._judged(), self._accounts()):
            for host in self.hosts.names:
                host.take_stacks()
            return STACKS_SECONDS
        return SETTLE_SECONDS if self._is_explained() else UNEXPLAINED_SECONDS

    def _is_explained(self) -> bool:
        """Return whether nothing more has to be waited for."""
        judged, accounts = self._judged(), self._accounts()
        return (bool(self._losses) or is_explained(judged, accounts)) and not is_hang(judged, accounts)

    def _outcome(self, seconds: float) -> Outcome:
        stop_seconds = 0.0 if self._failed_at is None else time.monotonic() - self._failed_at
        failure = find_cause(self._judged(), self._accounts(), self._losses, stop_seconds)
        return Outcome(0 if failure is None else failure.exit_code, seconds, failure)


# Why a job stopped: a rank's failure, or the loss of a host as a whole.


@dataclass(frozen=True)
class Loss:
    """A host that failed as a whole."""

    host: str
    when_seconds: float
    failure: HostFailure
    ranks: tuple[int, ...] = ()
    """Those that were running there."""


def find_cause(
    exits: Sequence[Exit], crashes: Sequence[Crash], losses: Sequence[Loss], stop_seconds: float
) -> Failure | None:
    """Return the first cause; None when nothing failed. See [Note: cause across hosts]."""
    suspects = find_suspects(exits, crashes)
    first = min(losses, key=lambda loss: loss.when_seconds, default=None)
    if first is not None and (not suspects or (0, first.when_seconds) < suspects[0].order):
        return _of_loss(first, exits, crashes, stop_seconds)
    return find_failure(exits, crashes, host=socket.gethostname(), stop_seconds=stop_seconds) if suspects else None


def _of_loss(loss: Loss, exits: Sequence[Exit], crashes: Sequence[Crash], stop_seconds: float) -> Failure:
    also = tuple(suspect.exit.rank for suspect in find_suspects(exits, crashes))
    stopped = {ended.rank for ended in exits if ended.code != 0} - set(also)
    failure, is_ours = loss.failure, loss.failure.is_ours
    running = f" (ranks {', '.join(map(str, loss.ranks))} ran there)" if loss.ranks and not is_ours else ""
    return Failure(
        None, "" if is_ours else loss.host, f"{failure.cause}{running}", failure.exit_code,
        also_failed=tuple(sorted(also)), stopped=tuple(sorted(stopped)), stop_seconds=stop_seconds,
        remedy=failure.remedy,
    )  # fmt: skip


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
