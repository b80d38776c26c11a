"""Progress while training: the metrics file of rank 0, and the progress line."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from ...core.vocabulary.events import (
    SETUP_CHECKPOINT_ALARM,
    SETUP_TUNING,
    SKIPPED_STEPS,
    Event,
    Logged,
    Setup,
    Started,
)
from ...core.vocabulary.run_files import METRICS
from ...core.vocabulary.units import format_rate, format_seconds
from .line_file import LineFile
from .rows import StepRow, own_waits

ROW_SECONDS = 0.1
TERMINAL_SECONDS = 0.2
PLAIN_SECONDS = 10.0
_TAIL_BYTES = 64 * 1024
"""Read of the metrics file for its newest row of progress."""


class Progress:
    """Turns steps into rows of progress, at most one every `every_seconds`; the first and last always.

    A row covers the steps since the previous one. Samples are counted on this rank and multiplied by the
    number of ranks, which the closing summary replaces by the true sum.
    """

    def __init__(self, every_seconds: float) -> None:
        self._every = every_seconds
        self._size = 1
        self._since = 0.0
        self._first_step_end = 0.0
        self._steps = 0
        self._samples = 0
        self._tokens = 0
        self._data = 0.0
        self._wait = 0.0
        self._loss: float | None = None
        self._total: int | None = None
        self._said: dict[str, Any] = {}
        """What rows repeat until it is taken back: alarms, and what is being tuned."""
        self.step = 0
        """The last one that is done."""

    def note(self, event: Event) -> None:
        """Note what an event tells that rows repeat."""
        if isinstance(event, Started):
            self._size, self._since = event.size, event.begin_seconds
        elif isinstance(event, Setup) and SETUP_CHECKPOINT_ALARM in event.values:
            self._said["alarm"] = str(event.values[SETUP_CHECKPOINT_ALARM])
        elif isinstance(event, Setup) and SETUP_TUNING in event.values:
            self._said["tuning"] = str(event.values[SETUP_TUNING])
        elif isinstance(event, Logged) and event.metrics and SKIPPED_STEPS in event.metrics:
            self._said["skipped_steps"] = int(event.metrics[SKIPPED_STEPS])

    def take_step(self, row: StepRow) -> dict[str, Any] | None:
        """Take a step; return a row of progress when one is due."""
        self._steps += 1
        self._samples += row.samples
        self._tokens += row.tokens or 0
        wait, data = own_waits(row)
        self._wait += wait
        self._data += data
        self._loss = self._loss if row.loss is None else row.loss
        self._total = self._total if row.total_steps is None else row.total_steps
        step, end = row.step, row.end_seconds
        self.step = step
        if step == 1:
            self._first_step_end = end
        is_last = self._total is not None and step >= self._total
        if end - self._since < self._every and step != 1 and not is_last:
            return None
        return self._row(step, end)

    def _row(self, step: int, end: float) -> dict[str, Any]:
        seconds = max(end - self._since, 1e-9)
        row: dict[str, Any] = {
            "kind": "step",
            "step": step,
            "seconds": round(seconds / self._steps, 6),
            "data_share": round(self._data / seconds, 4),
            "wait_share": round(self._wait / seconds, 4),
        }
        if self._samples:
            row["samples_per_second"] = round(self._samples * self._size / seconds, 3)
        if self._tokens:
            row["tokens_per_second"] = round(self._tokens * self._size / seconds, 3)
        if self._loss is not None:
            row["loss"] = self._loss
        if self._total is not None:
            row["total_steps"] = self._total
            if step > 1:
                pace = (end - self._first_step_end) / (step - 1)
                row["left_seconds"] = round(max(self._total - step, 0) * pace, 3)
        row |= {name: value for name, value in self._said.items() if value}
        self._since, self._steps, self._samples, self._tokens = end, 0, 0, 0
        self._data = self._wait = 0.0
        return row


class MetricsWriter:
    """Writes ``metrics.jsonl`` on rank 0: rows of progress, and the values given to `fd.log`."""

    def __init__(self, run_directory: Path) -> None:
        self._lines = LineFile(run_directory / METRICS)
        self._progress = Progress(ROW_SECONDS)
        self._logged: dict[str, tuple[int, float]] = {}
        """Values that are not written yet, with their steps."""
        self._logged_since = -math.inf

    def record(self, event: Event) -> None:
        """Take one event."""
        if isinstance(event, Logged) and event.metrics:
            self._take_metrics(event.metrics)
        self._progress.note(event)

    def record_step(self, row: StepRow) -> None:
        """Take a step that is done."""
        progress = self._progress.take_step(row)
        if progress is not None:
            self._lines.write(progress)

    def _take_metrics(self, metrics: Mapping[str, float]) -> None:
        """Keep the newest value of each name, and write them all when the last time is long enough ago."""
        step = self._progress.step + 1
        self._logged.update((name, (step, value)) for name, value in metrics.items())
        now = time.monotonic()
        if now - self._logged_since >= ROW_SECONDS:
            self._logged_since = now
            self._write_metrics()

    def _write_metrics(self) -> None:
        by_step: dict[int, dict[str, float]] = {}
        for name, (step, value) in self._logged.items():
            by_step.setdefault(step, {})[name] = value
        self._logged = {}
        for step in sorted(by_step):
            self._lines.write({"kind": "metrics", "step": step, "values": by_step[step]})

    def close(self) -> None:
        """Write buffered lines."""
        self._write_metrics()
        self._lines.close()


class TerminalProgress:
    """Draws the progress line itself, when no launcher does: over itself on a terminal, else now and then."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._progress = Progress(TERMINAL_SECONDS if self._live else PLAIN_SECONDS)
        self._process = os.getpid()
        self._drawn = False

    def record(self, event: Event) -> None:
        """Take one event."""
        self._progress.note(event)

    def record_step(self, row: StepRow) -> None:
        """Take a step that is done."""
        progress = self._progress.take_step(row)
        if progress is None or os.getpid() != self._process:
            return
        line = progress_line(progress)
        with contextlib.suppress(OSError, ValueError):
            if self._live:
                self._stream.write(f"\r\x1b[K{line}")
                self._drawn = True
            elif progress["step"] > 1:
                self._stream.write(line + "\n")
            self._stream.flush()

    def close(self) -> None:
        """Leave the last line standing."""
        if self._drawn:
            with contextlib.suppress(OSError, ValueError):
                self._stream.write("\n")


def progress_line(row: Mapping[str, Any]) -> str:
    """Return a row as a line: ``step 120/400  loss 2.310  1.2k samples/s  35 s left``."""
    total = row.get("total_steps")
    parts = [f"step {row['step']}/{total}" if total else f"step {row['step']}"]
    if row.get("loss") is not None:
        parts.append(f"loss {row['loss']:.4g}")
    is_start = row["step"] == 1  # of which the length says nothing of those that follow
    for key, unit in (("samples_per_second", "samples/s"), ("tokens_per_second", "tokens/s")):
        if row.get(key) and not is_start:
            parts.append(f"{format_rate(row[key])} {unit}")
    if not is_start and (len(parts) == 1 or (row.get("loss") is not None and len(parts) == 2)):
        parts.append(f"{format_seconds(row['seconds'])} a step")
    if row.get("left_seconds"):
        parts.append(f"{format_seconds(row['left_seconds'])} left")
    if row.get("skipped_steps"):
        parts.append(f"{row['skipped_steps']} skipped")
    if row.get("tuning"):
        parts.append(f"tuning: {row['tuning']}")
    if row.get("alarm"):
        parts.append(f"ALARM: {row['alarm']}")
    return "  ".join(parts)


def latest_progress(run_directory: Path) -> str | None:
    """Return the newest row of the metrics file as a line; None when there is none yet."""
    try:
        with (run_directory / METRICS).open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return None
    for line in reversed(lines):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            row = json.loads(line)
            if row["kind"] == "step":
                return progress_line(row)
    return None
