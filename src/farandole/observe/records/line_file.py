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

from ...core.vocabulary.run_files import FULL_DISK
from ...core.vocabulary.text import write_notice
from .rows import StepRow, ThinnedRow, step_seconds

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


# Which rows are kept, so that the records of a run of any length stay below a bound.
#
# Half of the bound takes every step. Half of the rest takes every 10th, half of that every 100th, and so on: a
# million steps of 2 kB each fit into 64 MiB. The steps between two that are kept become one row of sums. Ranks
# reach the limits at different times, but keep the same steps: multiples of the stride.

BOUND_BYTES = 64 * 2**20
STRIDE_FACTOR = 10
SAMPLES_FACTOR = 4
LAST_LEVEL = 12


class Downsampler:
    """Decides by the bytes written so far; adds up the omitted steps."""

    def __init__(self, bound_bytes: int = BOUND_BYTES) -> None:
        self._bound_bytes = bound_bytes
        self._samples_seen = 0
        self._sums: ThinnedRow | None = None

    def level(self, written_bytes: int) -> int:
        """Return how many times what may still be written has been halved."""
        level, limit = 0, self._bound_bytes / 2
        while written_bytes >= limit and level < LAST_LEVEL:
            level += 1
            limit += (self._bound_bytes - limit) / 2
        return level

    def take_step(self, row: StepRow, written_bytes: int) -> list[StepRow | ThinnedRow]:
        """Return what to write now: nothing, the step, or the sums of those left out and the step."""
        level = self.level(written_bytes)
        if level and (level == LAST_LEVEL or row.step % STRIDE_FACTOR**level):
            self._sums = add_up(self._sums, row)
            return []
        return [*self.close(), row]

    def takes_sample(self, written_bytes: int) -> bool:
        """Return whether to write the coming sample."""
        self._samples_seen += 1
        level = self.level(written_bytes)
        return level < LAST_LEVEL and self._samples_seen % SAMPLES_FACTOR**level == 0

    def close(self) -> list[StepRow | ThinnedRow]:
        """Return the sums of the steps omitted since the last row."""
        sums, self._sums = self._sums, None
        return [] if sums is None else [sums]


def add_up(sums: ThinnedRow | None, row: StepRow) -> ThinnedRow:
    """Return the sums of some steps and the step after them."""
    alone = ThinnedRow(
        row.step, row.step, 1, row.begin_seconds, row.end_seconds, row.samples, row.tokens or 0, row.sent_bytes,
        step_seconds(row), row.step, row.end_seconds - row.begin_seconds,
    )  # fmt: skip
    return alone if sums is None else merge(sums, alone)


def merge(sums: ThinnedRow, later: ThinnedRow) -> ThinnedRow:
    """Return the sums of some steps and of those after them."""
    slowest = later if later.slowest_seconds > sums.slowest_seconds else sums
    seconds = dict(sums.seconds)
    for name, more in later.seconds.items():
        seconds[name] = seconds.get(name, 0.0) + more
    return ThinnedRow(
        sums.first_step,
        later.last_step,
        sums.steps + later.steps,
        sums.begin_seconds,
        later.end_seconds,
        sums.samples + later.samples,
        sums.tokens + later.tokens,
        sums.sent_bytes + later.sent_bytes,
        seconds,
        slowest.slowest_step,
        slowest.slowest_seconds,
    )
