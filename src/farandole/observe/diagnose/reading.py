"""Reading a run of any length in bounded memory: a fair sample of its steps, and sums over all of them.

[Note: which steps are kept] Whole rows are kept until they hold more buckets than a budget; then every second
step is dropped, and again. A step's turn comes by a hash of its number, which is the same on all ranks and beats
no rhythm: of steps with a pause every hundred steps, the sample has its fair share. Pauses and lengths, which are
rare or small, are counted over all steps.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.errors import DataError
from ...core.events import STEP_PHASES, BucketLayout, ClockOffset, DevicePhases, Sample, Started
from ...core.run_files import RUN, events_path
from ..clock import common_clock
from ..phases import step_seconds
from ..rows import StepRow, ThinnedRow
from ..summary import read_run
from ..timeline import RankTimeline, stream

BUDGET = 400_000
"""Buckets, phases and exchanges of all ranks together that are held in memory."""
LEAST_STEPS = 64
LENGTHS_KEPT = 200_000
PAUSES_KEPT = 20_000
SAMPLES_KEPT = 20_000
NOTES_KEPT = 3
LAYOUTS_KEPT = 63
MISSING_KEPT = 1000
_HASH = 2654435761


@dataclass
class RankRecords:
    """What one rank left, as much of it as is kept."""

    timeline: RankTimeline
    """With the kept steps only."""
    level: int = 0
    """Steps were halved so many times."""
    held: int = 0
    """Buckets, phases and exchanges of the kept steps."""
    layout: BucketLayout | None = None
    """The newest, until the step that it is for is read."""
    step_count: int = 0
    skipped: int = 0
    """Lines that could not be read."""
    seconds: float = 0.0
    """Of all steps."""
    lengths: array[float] = field(default_factory=lambda: array("d"))
    """Of the steps in `numbers`."""
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
        raise DataError(f"{run_directory} holds nothing of a run", remedy=f"expected {RUN} or events-rank0.jsonl")
    facts = read_run(run_directory)
    notes: list[str] = []
    if not facts:
        notes.append(f"{RUN} is missing or cannot be read: plan and environment are unknown")
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


def read_rank(path: Path, notes: list[str]) -> RankRecords:
    """Read one rank's file. Raises `DataError` as `stream` does."""
    level = 0

    def wanted(step: int) -> bool:
        return turn(step, level)

    records = stream(path, wanted=wanted)
    started = next(records)
    assert isinstance(started, Started), "a stream begins with whose it is"
    kept = RankRecords(RankTimeline(started))
    for record in records:
        if isinstance(record, StepRow):
            _keep_step(kept, record)
            level = kept.level
        elif isinstance(record, Sample):
            _keep_sample(kept.timeline.samples, record)
        elif isinstance(record, ClockOffset):
            kept.timeline.clock_offsets.append(record)
        elif isinstance(record, BucketLayout):
            kept.layout = record
        elif isinstance(record, ThinnedRow):
            _count_thinned(kept, record)
        elif isinstance(record, DevicePhases):
            if turn(record.step, kept.level):
                kept.timeline.device_phases[record.step] = record.phases
        elif isinstance(record, str):
            kept.skipped += 1
            if kept.skipped <= NOTES_KEPT:
                notes.append(record)
    if kept.skipped > NOTES_KEPT:
        notes.append(f"{path.name}: {kept.skipped} lines in all could not be read")
    return kept


def _keep_step(kept: RankRecords, row: StepRow) -> None:
    timeline = kept.timeline
    if kept.layout is not None:
        timeline.layouts = [*timeline.layouts[-LAYOUTS_KEPT:], (row.step, kept.layout)]
        kept.layout = None
    _count_step(kept, row)
    if not turn(row.step, kept.level):
        return
    timeline.steps.append(row)
    kept.held += _weight(row)
    while kept.held > BUDGET // max(1, timeline.started.size) and len(timeline.steps) > LEAST_STEPS:
        _halve(kept)


def turn(step: int, level: int) -> bool:
    """Return whether a step is kept after so many halvings. See [Note: which steps are kept]."""
    return level == 0 or (step * _HASH) % 2**32 < 2 ** (32 - min(level, 32))


def common_steps(ranks: list[RankRecords]) -> list[int]:
    """Return the steps that all ranks have kept, in order."""
    if not ranks:
        return []
    common = set.intersection(*({row.step for row in records.timeline.steps} for records in ranks))
    return sorted(common)


def _weight(row: StepRow) -> int:
    return 1 + len(row.phases) + sum(1 + len(exchange.buckets) for exchange in row.exchanges)


def _halve(kept: RankRecords) -> None:
    kept.level += 1
    timeline = kept.timeline
    timeline.steps = [row for row in timeline.steps if turn(row.step, kept.level)]
    timeline.device_phases = {s: p for s, p in timeline.device_phases.items() if turn(s, kept.level)}
    kept.held = sum(_weight(row) for row in timeline.steps)


def _keep_sample(samples: list[Sample], sample: Sample) -> None:
    samples.append(sample)
    if len(samples) > SAMPLES_KEPT:
        del samples[::2]


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
