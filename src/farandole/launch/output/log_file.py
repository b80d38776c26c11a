"""A file of what a process prints. A disk that is full ends the writing, never the job.

log = LogFile(path, tell=lambda path, problem: ...)
log.write(b"...")
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_MOST_WAITING_BYTES = 64 * 1024

Tell = Callable[[Path, OSError], None]
"""Called when a file cannot be written any more, at most once a file."""


class LogFile:
    """Appends bytes to a private file; nothing here raises OSError but `check`."""

    def __init__(self, path: Path, tell: Tell, *, anew: bool = False) -> None:
        """Open `path`, with its directory made. `anew`: what it held before is forgotten."""
        self.path, self._tell = path, tell
        self._waiting = bytearray()
        self._descriptor = -1
        self._problem: OSError | None = None
        how = os.O_TRUNC if anew else os.O_APPEND
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | how | os.O_CLOEXEC, 0o600)
        except OSError as problem:
            self._stop(problem)

    def check(self) -> None:
        """Raise what keeps this file from being written."""
        if self._problem is not None:
            raise self._problem

    def write(self, data: bytes) -> None:
        """Take bytes; they are in the file after the next `flush`."""
        if self._descriptor >= 0:
            self._waiting += data
            if len(self._waiting) > _MOST_WAITING_BYTES:
                self.flush()

    def flush(self) -> None:
        """Let readers see what was written."""
        try:
            while self._waiting and self._descriptor >= 0:
                del self._waiting[: os.write(self._descriptor, self._waiting)]
        except OSError as problem:
            self._stop(problem)

    def close(self) -> None:
        """Write what waits, and close."""
        self.flush()
        self._release()

    def _stop(self, problem: OSError) -> None:
        self._problem = problem
        self._release()
        self._tell(self.path, problem)

    def _release(self) -> None:
        self._waiting.clear()
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):  # what a network's file system says at the end is too late for anything
                os.close(descriptor)


# Warnings that several ranks print alike: that of the first rank is shown. The logs have all of them.

_WARNING = re.compile(rb":\d+: \w*Warning: |^farandole: warning: ")
"""As Python prints a warning, ``train.py:3: UserWarning: ...``, and as Farandole does."""


class EqualWarnings:
    """What ranks have warned of so far."""

    def __init__(self) -> None:
        self._first: dict[bytes, int] = {}
        """The rank that printed a warning first."""
        self._hiding: set[int] = set()
        """Ranks whose last warning was hidden: the line of code below it is hidden with it."""

    def hides(self, rank: int, line: bytes) -> bool:
        """Return whether `line`, which `rank` wrote to stderr, belongs to a warning that another rank printed."""
        if rank in self._hiding and line.startswith(b"  "):
            return True
        self._hiding.discard(rank)
        if not _WARNING.search(line):
            return False
        is_equal = self._first.setdefault(line.strip(), rank) != rank
        if is_equal:
            self._hiding.add(rank)
        return is_equal
