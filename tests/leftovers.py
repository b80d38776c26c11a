"""What a job leaves in this machine's shared memory, told from what another job has there for a moment."""

from __future__ import annotations

import time
from pathlib import Path

_PASSING_SECONDS = 2.0
"""A job's names are there until all its ranks have mapped them. What stays longer is left behind."""


def memory_names() -> set[str]:
    """Return the names that are there now."""
    return {path.name for path in Path("/dev/shm").iterdir()}


def left_in_memory(before: set[str], *starts: str) -> set[str]:
    """Return which names of ours, or with one of `starts`, have come since `before` and stay."""

    def new() -> set[str]:
        return {name for name in memory_names() - before if "farandole" in name or name.startswith(starts)}

    left = new()
    deadline = time.monotonic() + _PASSING_SECONDS
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left &= new()
    return left
