"""SIGUSR1, the scheduler's warning that time is nearly up: passed on to the ranks that listen for it.

``sbatch --signal=USR1@60`` reaches the launcher. A rank that asks `fd.preempted` listens; any other program
would be ended by the signal, so it is spared.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def passing_on_warnings(processes: Callable[[], Iterable[int]]) -> Iterator[None]:
    """Inside the ``with``, a SIGUSR1 to this process goes to those of `processes` that catch it."""

    def pass_on(number: int, _: object) -> None:
        for process in processes():
            if catches(process, number):
                with suppress(ProcessLookupError):
                    os.kill(process, number)

    previous = signal.signal(signal.SIGUSR1, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, previous)


def catches(process: int, number: int) -> bool:
    """Return whether a process has a handler of its own for a signal."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)
