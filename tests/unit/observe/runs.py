"""Run directories with a known truth, written by the real writers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from farandole.core.vocabulary.events import DataWait, Exchange, Logged, Started, StepDone
from farandole.observe.records.progress import Progress
from farandole.observe.records.step_recorder import EventWriter, StepBuilder, StepRecorder


def make_run(
    directory: Path,
    *,
    compute: list[float],
    steps: int = 20,
    wire: float = 0.01,
    data: float = 0.002,
    samples: int = 4,
    command: list[str] | None = None,
    hosts: list[str] | None = None,
    loss: bool = True,
) -> Path:
    """Write a run whose rank r computes `compute[r]` seconds a step; the wire takes `wire` after the last."""
    directory.mkdir(parents=True, exist_ok=True)
    size = len(compute)
    facts: dict[str, Any] = {
        "version": 1,
        "size": size,
        "command": command or ["python", "t.py"],
        "started": "2026",
    }
    (directory / "run.json").write_text(json.dumps({**facts, "plan": {"accumulate": 1}, "hosts": hosts or ["h"]}))
    slowest = max(compute)
    for rank in range(size):
        writer = StepRecorder([EventWriter(directory, rank)])
        host = hosts[rank] if hosts else "h"
        writer.record(Started(rank, size, host, 1, 0, 100.0, "2026-01-01"))
        at = 100.0
        for step in range(1, steps + 1):
            writer.record(DataWait(at, at + data, samples))
            ready = at + data + compute[rank]
            together = at + data + slowest
            if size > 1:
                writer.record(Exchange((ready - 0.001, ready), ready, together + wire, 1000))
            if loss:
                writer.record(Logged(4.0 / step + rank, 8, steps))
            at = together + wire if size > 1 else ready
            writer.record(StepDone(step, at))
        writer.close()
    return directory


def progress_of(events: Iterable[Any]) -> list[dict[str, Any]]:
    """Return a row of progress for each step of these events."""
    builder, progress = StepBuilder(), Progress(0.0)
    rows = []
    for event in events:
        progress.note(event)
        step = builder.take(event)
        if step is not None and (row := progress.take_step(step)) is not None:
            rows.append(row)
    return rows
