"""Memory that is on disk: pages of a mapped file that the kernel has let go of, so that touching one waits for it.

This is what a process sees whose memory was swapped out: major page faults. Nothing else on the machine is slowed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import time
from pathlib import Path

_PAGES = 4096
_PAGE_BYTES = mmap.PAGESIZE


class ColdPages:
    """A mapped file of 16 MB, made at `path`."""

    def __init__(self, path: Path) -> None:
        with path.open("wb") as file:
            for _ in range(_PAGES // 256):
                file.write(os.urandom(256 * _PAGE_BYTES))
            file.flush()
            os.fsync(file.fileno())  # what is not on disk yet stays in memory
        self._path = path

    def wait_for_disk(self, seconds: float) -> int:
        """Touch pages that are not in memory, for so long; return how many. Each is a major page fault."""
        end, touched = time.monotonic() + seconds, 0
        with self._path.open("rb") as file:
            while True:
                # Only pages that nobody maps are let go of: each round has a mapping of its own.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                with contextlib.closing(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)) as pages:
                    pages.madvise(mmap.MADV_RANDOM)  # one page a fault, none ahead
                    for page in range(_PAGES):
                        if time.monotonic() >= end:
                            return touched
                        pages[page * _PAGE_BYTES]
                        touched += 1


def count_faults(path: Path) -> tuple[int, int]:
    """Return how many cold pages of a file made at `path` were touched, and how many major faults were counted."""
    pages = ColdPages(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    touched = pages.wait_for_disk(0.1)
    return touched, resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before
