"""A run with records of version 2 and a known truth: rank r's backward takes 20 + 20 r ms, the last holds all up.

Each step of 68 ms: data 0-2, forward 2-12 (a garbage collection 5-6 in it), backward from 12, two buckets,
optimizer, 1 ms of nothing. The first bucket is launched at 20 and on the wire 21-50; the second is launched when
backward ends.
"""

from __future__ import annotations

import json
from pathlib import Path

from farandole.core.vocabulary.events import (
    BACKWARD,
    FORWARD,
    GARBAGE_COLLECTION,
    OPTIMIZER,
    BucketFacts,
    BucketLayout,
    BucketTimes,
    ClockOffset,
    DataWait,
    Exchange,
    Logged,
    Phase,
    Sample,
    Started,
    StepDone,
)
from farandole.observe.records.step_recorder import EventWriter, StepRecorder

STEP = 0.068
WALL = "2026-11-21T12:00:00+00:00"
WALL_SECONDS = 1795262400


def make_phased_run(
    directory: Path, *, ranks: int = 2, steps: int = 10, clocks: list[float] | None = None, host: str = "h"
) -> Path:
    """Write the run. With `clocks`, rank r is on a host of its own whose clock is that much ahead of rank 0's."""
    directory.mkdir(parents=True, exist_ok=True)
    facts = {"size": ranks, "command": ["python", "t.py"], "started": WALL, "versions": {"torch": "2.13.0"}}
    (directory / "run.json").write_text(json.dumps(facts))
    for rank in range(ranks):
        writer = StepRecorder([EventWriter(directory, rank)])
        ahead = clocks[rank] if clocks else 0.0
        own = f"{host}{rank}" if clocks else host
        writer.record(Started(rank, ranks, own, 1, 0, 100.0 + ahead, WALL, own))
        if clocks and rank:
            writer.record(ClockOffset(100.0 + ahead, -ahead, 1e-5))
        facts_of = (BucketFacts(4000, "none", ("a", "b")), BucketFacts(4000, "none", ("c",)))
        writer.record(BucketLayout("flat", facts_of))
        at = 100.0 + ahead
        for step in range(1, steps + 1):
            _step(writer, at, step, rank, ranks)
            at += STEP
        writer.close()
    return directory


def _step(writer: StepRecorder, at: float, step: int, rank: int, ranks: int) -> None:
    ready, last = at + 0.032 + 0.02 * rank, at + 0.032 + 0.02 * (ranks - 1)
    writer.record(DataWait(at, at + 0.002, 4))
    writer.record(Phase(GARBAGE_COLLECTION, at + 0.005, at + 0.006))
    writer.record(Phase(FORWARD, at + 0.002, at + 0.012))
    writer.record(Phase(BACKWARD, at + 0.012, ready))
    first = BucketTimes(4000, 4000, at + 0.013, at + 0.02, at + 0.02, at + 0.021, at + 0.05)
    second = BucketTimes(4000, 4000, at + 0.03, ready, ready, ready, last + 0.01, 0.0, 0.001)
    writer.record(Exchange((at + 0.02, ready), ready, last + 0.01, 8000, (first, second)))
    writer.record(Phase(OPTIMIZER, last + 0.01, last + 0.015))
    writer.record(Logged(4.0 / step, 100, 10))
    writer.record(Sample(at + 0.01, 1.0, 1.5, 0.7, 2, 123_000_000, 999_000_000))
    writer.record(StepDone(step, at + STEP))
