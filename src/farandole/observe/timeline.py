"""Events on disk: one file a rank, one line a step. Written while training, readable after a kill.

The first line says whose it is; each further line is one step (`StepRow`). Times are seconds of the
host's monotonic clock, rounded to a microsecond.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ..core.errors import DataError
from ..core.events import EVENTS_VERSION, DataWait, Event, Exchange, Logged, Started, StepDone
from ..core.run_files import events_path

FLUSH_SECONDS = 1.0


@dataclass(frozen=True)
class ExchangeRow:
    """One exchange of gradients within a step."""

    launch_seconds: list[float]
    wait_begin_seconds: float
    wait_end_seconds: float
    sent_bytes: int


@dataclass(frozen=True)
class StepRow:
    """One optimizer step of one rank."""

    step: int
    begin_seconds: float
    end_seconds: float
    data_seconds: float
    samples: int
    exchanges: list[ExchangeRow]
    loss: float | None = None
    tokens: int | None = None
    total_steps: int | None = None


@dataclass
class RankTimeline:
    """What one rank did."""

    started: Started
    steps: list[StepRow] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Lines that could not be read, as ``file:line: reason``."""


class StepBuilder:
    """Gathers events until a step is done, then gives its row."""

    def __init__(self) -> None:
        self._begin = 0.0
        self._clear()

    def _clear(self) -> None:
        self._data = 0.0
        self._samples = 0
        self._exchanges: list[Exchange] = []
        self._loss: float | None = None
        self._tokens: int | None = None
        self._total: int | None = None

    def take(self, event: Event) -> dict[str, Any] | None:
        """Take an event; return the finished step as plain values when it was the last of one."""
        if isinstance(event, Exchange):
            self._exchanges.append(event)
        elif isinstance(event, DataWait):
            self._data += event.end_seconds - event.begin_seconds
            self._samples += event.samples
        elif isinstance(event, Logged):
            self._loss = event.loss if event.loss is not None else self._loss
            self._total = event.total_steps if event.total_steps is not None else self._total
            if event.tokens is not None:
                self._tokens = (self._tokens or 0) + event.tokens
        elif isinstance(event, Started):
            self._begin = event.begin_seconds
        else:
            return self._finish(event)
        return None

    def _finish(self, event: StepDone) -> dict[str, Any]:
        row: dict[str, Any] = {
            "step": event.step,
            "begin_seconds": round(self._begin, 6),
            "end_seconds": round(event.end_seconds, 6),
            "data_seconds": round(self._data, 6),
            "samples": self._samples,
            "exchanges": [
                {
                    "launch_seconds": [round(at, 6) for at in exchange.launch_seconds],
                    "wait_begin_seconds": round(exchange.wait_begin_seconds, 6),
                    "wait_end_seconds": round(exchange.wait_end_seconds, 6),
                    "sent_bytes": exchange.sent_bytes,
                }
                for exchange in self._exchanges
            ],
        }
        optional = {"loss": self._loss, "tokens": self._tokens, "total_steps": self._total}
        row |= {name: value for name, value in optional.items() if value is not None}
        self._begin = event.end_seconds
        self._clear()
        return row


class LineFile:
    """Appends JSON lines to a private file, flushed at most once a second; training never fails for it."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._file: IO[str] | None = os.fdopen(descriptor, "w", encoding="utf-8")
        self._path = path
        self._process = os.getpid()
        self._flushed = time.monotonic()

    def write(self, row: dict[str, Any]) -> None:
        """Append one line."""
        if self._file is None or os.getpid() != self._process:
            return  # a forked child (a loader's worker) must not write what its parent will write too
        now = time.monotonic()
        try:
            self._file.write(json.dumps(row) + "\n")
            if now - self._flushed >= FLUSH_SECONDS:
                self._file.flush()
                self._flushed = now
        except OSError as problem:
            sys.stderr.write(f"farandole: recording stops, cannot write {self._path}: {problem}\n")
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
                sys.stderr.write(f"farandole: cannot write {self._path}: {problem}\n")


class EventWriter:
    """Records one rank's events in the run directory. A `core.events.Recorder`."""

    def __init__(self, run_directory: Path, rank: int) -> None:
        self._lines = LineFile(events_path(run_directory, rank))
        self._builder = StepBuilder()

    def record(self, event: Event) -> None:
        """Take one event."""
        if isinstance(event, Started):
            self._lines.write({"version": EVENTS_VERSION, **dataclasses.asdict(event)})
        row = self._builder.take(event)
        if row is not None:
            self._lines.write(row)

    def close(self) -> None:
        """Write what is left."""
        self._lines.close()


def read_events(path: Path) -> RankTimeline:
    """Read one rank's events. A last line cut short by a kill is left out; corrupt lines are counted.

    Raises `DataError` when there is no such file, nothing in it says whose it is, or it is of a newer version.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as problem:
        raise DataError(f"cannot read {path}: {problem}") from None
    whole, last = lines[:-1], lines[-1]
    timeline = RankTimeline(_read_header(path, whole[0] if whole else last))
    for number, line in enumerate(whole[1:], start=2):
        try:
            timeline.steps.append(_read_step(json.loads(line)))
        except (ValueError, TypeError, KeyError, AttributeError) as problem:
            timeline.skipped.append(f"{path.name}:{number}: {type(problem).__name__}: {problem}")
    if last and whole:
        timeline.skipped.append(f"{path.name}:{len(lines)}: cut short")
    return timeline


def _read_header(path: Path, line: str) -> Started:
    try:
        values = json.loads(line)
        version = values.pop("version")
        if version > EVENTS_VERSION:
            raise DataError(
                f"{path}: events of version {version}, this farandole reads up to {EVENTS_VERSION}",
                remedy="upgrade with: pip install --upgrade farandole",
            )
        started = Started(**values)
        if not (isinstance(started.rank, int) and isinstance(started.size, int)):
            raise TypeError("rank and size must be whole numbers")
    except (ValueError, TypeError, KeyError, AttributeError) as problem:
        raise DataError(f"{path}: the first line does not say whose events these are ({problem})") from None
    return started


def _read_step(values: Any) -> StepRow:
    exchanges = [ExchangeRow(**exchange) for exchange in values.pop("exchanges")]
    row = StepRow(exchanges=exchanges, **values)
    numbers = [row.begin_seconds, row.end_seconds, row.data_seconds, row.samples, row.step]
    numbers += [
        number for e in exchanges for number in (*e.launch_seconds, e.wait_begin_seconds, e.wait_end_seconds)
    ]
    if not all(isinstance(number, (int, float)) and not isinstance(number, bool) for number in numbers):
        raise TypeError("a time or count is not a number")
    return row
