"""A file of JSON lines that a training process appends to, and that a kill leaves readable."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import time
import weakref
from pathlib import Path
from typing import IO, Any

from ...core.vocabulary.notice import write_notice
from ...core.vocabulary.run_files import FULL_DISK

FLUSH_SECONDS = 1.0
_open_files: weakref.WeakSet[LineFile] = weakref.WeakSet()


class LineFile:
    """Appends JSON lines to a private file, flushed at most once a second; training never fails for it."""

    def __init__(self, path: Path) -> None:
        """Raises OSError when the file cannot be opened, unless the disk is full: then nothing is recorded."""
        self._path = path
        self._file: IO[str] | None = None
        self.written_bytes = 0
        """Size of the file, with what is not flushed yet."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as problem:
            if problem.errno not in FULL_DISK:
                raise
            write_notice(f"nothing is recorded, cannot write {path}: {problem}")
            return
        self._file = os.fdopen(descriptor, "w", encoding="utf-8")
        self._process = os.getpid()
        self._flushed = -math.inf  # the first line at once: it says whose the file is, whenever the kill comes
        _open_files.add(self)
        _watch_forks()
        self.written_bytes = os.fstat(descriptor).st_size

    def write(self, row: dict[str, Any]) -> None:
        """Append one line."""
        if self._file is None or os.getpid() != self._process:
            return  # a forked child (a loader's worker) must not write what its parent will write too
        now = time.monotonic()
        try:
            self.written_bytes += self._file.write(json.dumps(row, separators=(",", ":")) + "\n")
            if now - self._flushed >= FLUSH_SECONDS:
                self._file.flush()
                self._flushed = now
        except OSError as problem:
            write_notice(f"recording stops, cannot write {self._path}: {problem}")
            file, self._file = self._file, None
            with contextlib.suppress(OSError):
                file.close()

    def close(self) -> None:
        """Flush and close."""
        file, self._file = self._file, None
        if file is not None and os.getpid() == self._process:
            try:
                file.close()
            except OSError as problem:
                write_notice(f"cannot write {self._path}: {problem}")

    def forget(self) -> None:
        """In a forked child: what is not flushed yet is the parent's to write, and goes nowhere from here."""
        if self._file is not None:
            nothing = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(nothing, self._file.fileno(), inheritable=False)
            os.close(nothing)


@functools.cache
def _watch_forks() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    for file in list(_open_files):
        file.forget()
