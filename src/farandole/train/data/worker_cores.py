"""Which cores the workers of a data loader may use: the rank's own, and those that no rank has.

[Note: workers inherit cores] A process has the cores of the thread that starts it. The launcher binds ranks to
equal shares of the host's cores; what remains of the division belongs to no rank. While a loader starts its
workers, the thread that starts them may use these too, and then has its own cores back. A rank whose cores the
script has chosen itself keeps them, and so do its workers. A user's ``worker_init_fn`` runs later and is not
touched.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
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
