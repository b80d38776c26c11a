"""Workers of data loaders, which live until their rank has saved.

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
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from torch.utils.data import dataloader

from ...core.host.process_status import catches, ignores

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
