"""SIGUSR1, the scheduler's warning that time is nearly up: passed on to the ranks that listen for it.

``sbatch --signal=USR1@60`` reaches the launcher. A rank that asks `fd.preempted` listens for SIGUSR1; any other
program would be ended by the signal, so it is spared.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def warn(processes: Iterable[int], number: int) -> None:
    """Pass a warning signal on to those of `processes` that catch it."""
    for process in processes:
        if catches(process, number):
            with suppress(ProcessLookupError):
                os.kill(process, number)


def catches(process: int, number: int) -> bool:
    """Return whether a process has a handler of its own for a signal."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)
