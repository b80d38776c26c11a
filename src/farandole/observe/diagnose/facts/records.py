"""Reading a run of any length in bounded memory: a fair sample of its steps (`sampling`), sums over all of them.

Pauses and lengths, which are rare or small, are counted over all steps.
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....core.vocabulary.errors import DataError
from ....core.vocabulary.events import (
    STEP_PHASES,
    BucketLayout,
    ClockOffset,
    DevicePhases,
    Sample,
    Started,
    Traffic,
)
from ....core.vocabulary.run_files import RUN, events_path
from ...figures.summary import read_run
from ...format.phases import step_seconds
from ...format.rows import StepRow, ThinnedRow
from ...read.clock import common_clock
from ...read.run_end import note_killed
from ...read.sampling import StepSample, share_of_budget
from ...read.timeline_reader import LAYOUTS_KEPT, RankTimeline, keep_sample, stream

LENGTHS_KEPT = 200_000
PAUSES_KEPT = 20_000
NOTES_KEPT = 3
MISSING_KEPT = 1000
INSIDE_NAMED = 4


@dataclass
class RankRecords:
    """What one rank left, as much of it as is kept."""

    timeline: RankTimeline
    """With the rows of the kept steps, and sums of the others."""
    sample: StepSample
    """Which steps are kept."""
    layout: BucketLayout | None = None
    """The newest, until the step that it is for is read."""
    step_count: int = 0
    skipped: int = 0
    """Lines that could not be read."""
    seconds: float = 0.0
    """Over all steps."""
    lengths: array[float] = field(default_factory=lambda: array("d"))
    """Over the steps in `numbers`."""
    numbers: array[int] = field(default_factory=lambda: array("q"))
    pauses: dict[str, dict[int, float]] = field(default_factory=dict)
    """By name: step and seconds, of steps with a pause."""
    thinned_pauses: dict[str, float] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """Its rank."""
        return self.timeline.started.rank

    @property
    def host(self) -> str:
        """Its host."""
        return self.timeline.started.host


@dataclass
class Records:
    """What a run left."""

    name: str
    facts: Mapping[str, Any]
    """``run.json``; empty when there is none."""
    size: int
    ranks: list[RankRecords]
    """With at least one step, by rank; times on one clock as far as that can be."""
    apart: frozenset[int] = frozenset()
    """Ranks whose clock cannot be compared with the others'."""
    clock_error_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    """Ranks that left nothing."""

    @property
    def plan(self) -> Mapping[str, Any]:
        """The plan as it was applied, or nothing."""
        plan = self.facts.get("plan")
        return plan if isinstance(plan, dict) else {}


def read_records(run_directory: Path) -> Records:
    """Read a run directory. What is missing is said in `Records.notes`.

    Raises `DataError` when it is no run directory.
    """
    if not run_directory.is_dir():
        raise DataError(f"{run_directory} is not a run directory", remedy="name a directory below runs/")
    paths = sorted(run_directory.glob("events-rank*.jsonl"))
    if not paths and not (run_directory / RUN).exists():
        raise no_run(run_directory)
    facts = read_run(run_directory)
    notes: list[str] = []
    if not facts:
        notes.append(f"{RUN} is missing or cannot be read: plan and environment are unknown")
    notes += note_killed(run_directory, time.time())
    found: dict[int, RankRecords] = {}
    for path in paths:
        try:
            records = read_rank(path, notes)
        except DataError as problem:
            notes.append(problem.message)
            continue
        if records.rank in found:
            notes.append(f"{path.name}: says it is rank {records.rank}'s, as another file does; left out")
            continue
        found[records.rank] = records
    size = facts.get("size") or max((records.timeline.started.size for records in found.values()), default=0)
    missing = _note_missing(run_directory, found, size, notes)
    _note_idle(found, notes)
    ranks = [found[rank] for rank in sorted(found) if found[rank].timeline.steps]
    clock = common_clock([records.timeline for records in ranks])
    for records, timeline in zip(ranks, clock.timelines, strict=True):
        records.timeline = timeline
    notes += clock.notes
    return Records(run_directory.name, facts, size, ranks, clock.apart, clock.error_seconds, notes, missing)


def no_run(directory: Path) -> DataError:
    """Return the error of a directory that holds nothing of a run, with the runs that are in it, as in demos."""
    inside = [path.parent.name for path in sorted(directory.glob(f"*/{RUN}"))[:INSIDE_NAMED]]
    remedy = (
        f"name one of the runs in it: {', '.join(inside)}" if inside else f"expected {RUN} or events-rank0.jsonl"
    )
    return DataError(f"{directory} holds nothing of a run", remedy=remedy)


def read_rank(path: Path, notes: list[str]) -> RankRecords:
    """Read one rank's file. Raises `DataError` as `stream` does."""
    sample: StepSample | None = None
    records = stream(path, wanted=lambda step: sample is None or sample.wanted(step))
    started = next(records)
    assert isinstance(started, Started), "a stream begins with whose it is"
    sample = StepSample(share_of_budget(started.size))
    timeline = RankTimeline(started, steps=sample.steps, thinned=sample.sums, loss_ends=sample.loss_ends)
    kept = RankRecords(timeline, sample)
    for record in records:
        if isinstance(record, StepRow):
            _keep_step(kept, record)
        elif isinstance(record, Sample):
            keep_sample(kept.timeline.samples, record)
        elif isinstance(record, Traffic):
            kept.timeline.ways.add(record)
        elif isinstance(record, ClockOffset):
            kept.timeline.clock_offsets.append(record)
        elif isinstance(record, BucketLayout):
            kept.layout = record
        elif isinstance(record, ThinnedRow):
            sample.take(record)
            _count_thinned(kept, record)
        elif isinstance(record, DevicePhases):
            if sample.wanted(record.step):
                kept.timeline.device_phases[record.step] = record.phases
        elif isinstance(record, str):
            kept.skipped += 1
            if kept.skipped <= NOTES_KEPT:
                notes.append(record)
    device = kept.timeline.device_phases
    kept.timeline.device_phases = {step: phases for step, phases in device.items() if sample.wanted(step)}
    if kept.skipped > NOTES_KEPT:
        notes.append(f"{path.name}: {kept.skipped} lines in all could not be read")
    return kept


def _keep_step(kept: RankRecords, row: StepRow) -> None:
    timeline = kept.timeline
    if kept.layout is not None:
        timeline.layouts = [*timeline.layouts[-LAYOUTS_KEPT:], (row.step, kept.layout)]
        kept.layout = None
    _count_step(kept, row)
    kept.sample.take(row)


def common_steps(ranks: list[RankRecords]) -> list[int]:
    """Return the steps that all ranks have kept, in order."""
    if not ranks:
        return []
    common = set.intersection(*({row.step for row in records.timeline.steps} for records in ranks))
    return sorted(common)


def _count_step(kept: RankRecords, row: StepRow) -> None:
    length = row.end_seconds - row.begin_seconds
    kept.step_count += 1
    kept.seconds += length
    if len(kept.lengths) < LENGTHS_KEPT:
        kept.lengths.append(length)
        kept.numbers.append(row.step)
    if all(phase.name in STEP_PHASES for phase in row.phases) and not row.more_seconds:
        return
    for name, seconds in step_seconds(row).items():
        if name not in STEP_PHASES and name != "other" and seconds > 0:
            by_step = kept.pauses.setdefault(name, {})
            if len(by_step) < PAUSES_KEPT:
                by_step[row.step] = seconds


def _count_thinned(kept: RankRecords, row: ThinnedRow) -> None:
    kept.step_count += row.steps
    kept.seconds += row.end_seconds - row.begin_seconds
    for name, seconds in row.seconds.items():
        if name not in STEP_PHASES and name != "other":
            kept.thinned_pauses[name] = kept.thinned_pauses.get(name, 0.0) + seconds


def _note_missing(run_directory: Path, found: Mapping[int, RankRecords], size: int, notes: list[str]) -> list[int]:
    missing = list(itertools.islice((rank for rank in range(size) if rank not in found), MISSING_KEPT))
    if missing and found:
        count = size - sum(rank < size for rank in found)
        names = ", ".join(events_path(run_directory, rank).name for rank in missing[:4])
        more = ", ..." if len(missing) > 4 else ""
        notes.append(f"{count} of {size} ranks left no events ({names}{more}): what they did is not part of this")
    return missing if found else []


def _note_idle(found: Mapping[int, RankRecords], notes: list[str]) -> None:
    for rank, records in sorted(found.items()):
        if not records.timeline.steps:
            notes.append(f"rank {rank} recorded no step")
