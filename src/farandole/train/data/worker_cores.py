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

[Note: a signal to all] A scheduler may send SIGTERM or SIGUSR1 to every process of a job, and a worker that ends
then takes the batch of the step that was to end with a save. So a worker leaves them to a rank that has a handler:
the rank ends its workers itself. It looks when the signal comes, as a rank may begin to listen later. A rank that
is at its end ignores SIGTERM, and then the one that ``multiprocessing`` sends ends the workers.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import statistics
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from torch.utils.data import dataloader

from ...core.env import read_core_shares
from ...core.host.process_status import catches, ignores


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


# Workers of data loaders, which live until their rank has saved.

_DEAF_SECONDS = 5.0
"""For a worker to end after SIGTERM, when its rank is at its end."""
_spared: weakref.WeakSet[BaseProcess] = weakref.WeakSet()


@contextmanager
def sparing_workers(loader: Any) -> Iterator[None]:
    """Have workers that `loader` starts meanwhile leave SIGTERM to this process. See [Note: a signal to all]."""
    if not loader.num_workers:
        yield
        return
    _ignore_at_exit()
    theirs, before = loader.worker_init_fn, set(multiprocessing.active_children())
    loader.worker_init_fn = partial(_begin_worker, theirs, os.getpid())
    try:
        yield
    finally:
        loader.worker_init_fn = theirs
        _spared.update(set(multiprocessing.active_children()) - before)


@cache
def spare_all_workers() -> None:
    """Do so for all loaders of torch's own class from now on."""
    kind = dataloader._MultiProcessingDataLoaderIter
    start = kind.__init__

    def begin(iterator: Any, loader: Any) -> None:
        with sparing_workers(loader):
            start(iterator, loader)

    kind.__init__ = begin  # type: ignore[method-assign, assignment]


@cache
def _ignore_at_exit() -> None:
    rank = os.getpid()

    def ignore() -> None:
        if os.getpid() != rank or threading.current_thread() is not threading.main_thread():
            return
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        alive = [os.pidfd_open(each.pid) for each in _spared if each.is_alive() and each.pid is not None]
        if alive:
            timer = threading.Timer(_DEAF_SECONDS, _kill, [alive])
            timer.daemon = True
            timer.start()

    atexit.register(ignore)  # after multiprocessing's own, so that it runs before that


def _kill(workers: list[int]) -> None:
    """Kill those that have not ended: in code that is no Python's a handler does not run."""
    for descriptor in workers:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        os.close(descriptor)


def _begin_worker(theirs: Callable[[int], None] | None, rank: int, worker: int) -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, partial(_told_to_end, rank, os.getppid()))
    if theirs is not None:
        theirs(worker)


def _told_to_end(rank: int, starter: int, number: int, _: FrameType | None) -> None:
    """`starter`: who started this worker, the rank or a server of ``multiprocessing``."""
    if os.getppid() != starter or ignores(rank, number):
        os._exit(0)  # as torch's own handler does when the rank ends it
    if not catches(rank, number):
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
