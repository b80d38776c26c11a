"""Which cores the workers of a data loader may use: the rank's own, and those that no rank has; and their number.

[Note: workers inherit cores] A process has the cores of the thread that starts it. The launcher binds ranks to
equal shares of the host's cores; what remains of the division belongs to no rank. While a loader starts its
workers, the thread that starts them may use these too, and then has its own cores back. A rank whose cores the
script has chosen itself keeps them, and so do its workers. A user's ``worker_init_fn`` runs later and is not
touched.

[Note: more workers] Under ``farandole tune`` a loader that the steps wait for gets twice as many workers in its
next iteration, up to one a core; if steps are not shorter then, it gets back what it had. What a step trains on
stays the same: with workers, random numbers go by the place in the data. So a loader without workers is left
alone, whose augmentation draws from the generators of the training; so are streams, which workers divide, and
persistent workers, which outlive an iteration.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from ...core.environ.env import read_core_shares


def worker_cores() -> set[int]:
    """Return the cores of workers that are started now; empty where the system does not say."""
    if not hasattr(os, "sched_getaffinity"):
        return set()
    mine = set(os.sched_getaffinity(0))
    shares = read_core_shares()
    return mine | set(shares.spare) if shares is not None and mine == set(shares.own) else mine


@contextmanager
def on_worker_cores() -> Iterator[None]:
    """Let this thread, and processes it starts, use the workers' cores. See [Note: workers inherit cores]."""
    wanted = worker_cores()
    before = set(os.sched_getaffinity(0)) if wanted else set()
    if wanted == before:
        yield
        return
    try:
        with suppress(OSError):  # cores that were taken offline, or that a container lost: workers have the rank's
            os.sched_setaffinity(0, wanted)
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, before)


LEAST_BATCHES = 8
"""An iteration of fewer says nothing."""
_FIRST = 2
"""Batches for which workers are started and filled."""
_LEAST_WAIT = 0.05
_LEAST_GAIN = 0.03


class WorkerTrials:
    """Numbers of workers of one loader, tried an iteration each. See [Note: more workers]."""

    def __init__(self, most: int) -> None:
        """`most`: workers that may be started."""
        self._most = most
        self._begins: list[float] = []
        self._waits: list[float] = []
        self._kept: tuple[int, float] | None = None
        """The number in force, and the seconds of a step with it; while another one is tried."""
        self._is_over = False
        self.workers = 0
        """Workers of the iteration that began last."""
        self.said: list[str] = []
        """What was tried and came of it, for people."""

    def note(self, begin_seconds: float, end_seconds: float) -> None:
        """The training asked for a batch, and got it."""
        self._begins.append(begin_seconds)
        self._waits.append(end_seconds - begin_seconds)

    def begin(self, workers: int) -> int:
        """Return the number of workers of the iteration that begins; `workers`: what the loader has."""
        begins, waits = self._begins[_FIRST:], self._waits[_FIRST:]
        self._begins, self._waits = [], []
        self.workers = self._next(workers, begins, waits)
        return self.workers

    def _next(self, workers: int, begins: Sequence[float], waits: Sequence[float]) -> int:
        if self._is_over or len(begins) < LEAST_BATCHES:
            return workers
        if workers < 1:
            self._is_over = True
            self.said.append("num_workers 0 stays: with workers augmentation would draw other random numbers")
            return workers
        step = (begins[-1] - begins[0]) / (len(begins) - 1)
        if self._kept is not None:
            before, seconds = self._kept
            gain, self._kept = 1 - step / seconds, None
            if gain < _LEAST_GAIN:
                self._is_over = True
                self.said.append(f"num_workers {workers} gains {gain:.1%} over {before}: back to {before}")
                return before
            self.said.append(f"num_workers {workers} instead of {before}: {gain:.1%} shorter steps")
        share = statistics.fmean(waits) / step if step > 0 else 0.0
        more = min(2 * workers, self._most)
        if share < _LEAST_WAIT or more <= workers:
            self._is_over = True
            return workers
        self._kept = workers, step
        return more


class TunedLoaders:
    """Those of one world whose workers are tuned; kept by its session where that is asked for."""

    def __init__(self) -> None:
        self.trials: dict[int, WorkerTrials] = {}
        """Those of each loader, by its number."""

    def trials_of(self, number: int) -> WorkerTrials:
        """Return the trials of a loader."""
        if number not in self.trials:
            self.trials[number] = WorkerTrials(max(1, len(worker_cores())))
        return self.trials[number]
