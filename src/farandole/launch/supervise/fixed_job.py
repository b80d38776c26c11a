"""A job of fixed ranks, wherever they run: all are stopped when one fails, once the first cause is known."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence

from ...core.vocabulary.run_files import Crash
from ..job.contract import JobSpec
from ..output import Output
from .failure import Exit, Failure, is_explained, is_hang
from .job_loop import JobLoop, Outcome
from .stacks import STACKS_SECONDS

SETTLE_SECONDS = 0.15
"""After the first failure: the accounts of ranks that failed for the same reason arrive."""
UNEXPLAINED_SECONDS = 1.0
"""The same as long as no rank has said more than that another is gone: that one may take its time to end."""


class FixedJob(JobLoop):
    """Decides when the ranks are stopped. Subclasses start them, and know how they ended."""

    def __init__(self, output: Output, job: JobSpec, status: Callable[[], str | None] = lambda: None) -> None:
        """`status` returns the latest line of progress, None when there is none."""
        super().__init__(output, job, status)
        self._exits: list[Exit] = []
        self._missed: set[int] = set()
        """Ranks that were killed, and without which the others go on."""
        self._failed_at: float | None = None

    # -- what subclasses do ----------------------------------------------------------------------

    def _crashes(self) -> Sequence[Crash]:
        """Return the accounts of crashes so far."""
        raise NotImplementedError

    def _take_stacks(self) -> None:
        """Have the ranks' stacks taken, where that is possible: the job hangs."""

    def _has_failed(self, now: float) -> bool:
        return any(ended.failed for ended in self._judged())

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

    def _find_failure(self, stop_seconds: float) -> Failure | None:
        """Return the first cause of a failure; None when nothing failed."""
        raise NotImplementedError

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

    def _settle_seconds(self) -> float:
        """Return how long the other ranks get before they are stopped."""
        if is_hang(self._judged(), self._crashes()):
            self._take_stacks()
            return STACKS_SECONDS
        return SETTLE_SECONDS if self._is_explained() else UNEXPLAINED_SECONDS

    def _is_explained(self) -> bool:
        """Return whether nothing more has to be waited for."""
        crashes = self._crashes()
        judged = self._judged()
        return is_explained(judged, crashes) and not is_hang(judged, crashes)

    def _outcome(self, seconds: float) -> Outcome:
        failure = self._find_failure(0.0 if self._failed_at is None else time.monotonic() - self._failed_at)
        return Outcome(0 if failure is None else failure.exit_code, seconds, failure)
