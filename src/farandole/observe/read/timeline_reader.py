"""Reading the events of one rank from disk, also after a kill. Format: `docs/notes/records.md`.

The first line says whose it is and in which version; each further line is one step or another record (`rows`).
Files of version 1 are read too: they know the data's and the exchange's time and no other phase.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.vocabulary.errors import DataError
from ...core.vocabulary.events import (
    EVENTS_VERSION,
    BucketLayout,
    ClockOffset,
    DevicePhases,
    Phase,
    Sample,
    Setup,
    SetupValue,
    Started,
    Traffic,
)
from ...core.vocabulary.suggestions import upgrade_remedy
from ..format import rows
from ..format.rows import StepRow, ThinnedRow
from .link_traffic import RankTraffic
from .sampling import LoggedLoss, StepSample, share_of_budget
from .step_counts import StepCounts

SKIPPED_KEPT = 100
SAMPLES_KEPT = 20_000
LAYOUTS_KEPT = 63
SETUP_KEPT = 100
_LONGEST_LINE = 64 * 2**20
_UNREADABLE = (
    ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError,
)  # fmt: skip


@dataclass
class RankTimeline:
    """What one rank did."""

    started: Started
    steps: list[StepRow] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Lines that could not be read, as ``file:line: reason``; the first hundred."""
    thinned: list[ThinnedRow] = field(default_factory=list)
    """Steps of a long run that have no row of their own."""
    samples: list[Sample] = field(default_factory=list)
    traffic: RankTraffic = field(default_factory=RankTraffic)
    """What went to other hosts, in all."""
    clock_offsets: list[ClockOffset] = field(default_factory=list)
    """Measured by the first rank of each host but rank 0's; `observe.clock` puts all ranks on one clock."""
    setup: dict[str, SetupValue] = field(default_factory=dict)
    """Facts about the training, the newest of each name (`core.events.Setup`)."""
    layouts: list[tuple[int, BucketLayout]] = field(default_factory=list)
    """What is in the buckets, each from a step on."""
    device_phases: dict[int, tuple[Phase, ...]] = field(default_factory=dict)
    """What the accelerator did, by step."""
    loss_ends: list[LoggedLoss] = field(default_factory=list)
    """The first and the last loss, where not all steps are in `steps`."""
    halvings: int = 0
    """How often the reader, not the recorder, left out every second row."""
    skipped_lines: int = 0
    """How many lines could not be read."""
    counts: StepCounts = field(default_factory=StepCounts)
    """Sums over all steps, where the reader was asked for them."""

    @property
    def rank(self) -> int:
        """The rank that recorded."""
        return self.started.rank

    @property
    def host(self) -> str:
        """Its host."""
        return self.started.host

    @property
    def step_count(self) -> int:
        """Steps, those without a row of their own too."""
        return len(self.steps) + sum(row.steps for row in self.thinned)


Record = StepRow | ThinnedRow | Sample | Setup | Traffic | ClockOffset | BucketLayout | DevicePhases


def _lines(path: Path, wanted: Callable[[int], bool]) -> Iterator[Any]:
    """Yield whose records they are, then the records one by one; for a line that cannot be read, why, as a text.

    Holds one line at a time. Steps that are not `wanted` come without their buckets, in much less time.
    """
    try:
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            version, started = _read_header(path, file.readline(_LONGEST_LINE))
            yield started
            number = 1
            while line := file.readline(_LONGEST_LINE):
                number += 1
                if not line.endswith("\n"):
                    yield f"{path.name}:{number}: cut short"
                    continue
                try:
                    values = json.loads(line)
                    if "generation" not in values:  # else a header: of the same rank in another generation
                        yield _decode(values, version, wanted)
                except _UNREADABLE as problem:
                    why = "not JSON" if isinstance(problem, json.JSONDecodeError) else _why(problem)
                    yield f"{path.name}:{number}: no record: {why}"
    except OSError as problem:
        raise DataError(f"cannot read {path}: {problem}") from None


def read_events(
    path: Path, *, bounded: bool = False, steps: tuple[int, int] | None = None, counts: bool = False
) -> RankTimeline:
    """Read one rank's events. A last line cut short by a kill is left out; corrupt lines are counted.

    Args:
        path: the rank's file.
        bounded: hold a fair sample of what a long run has too much of, its steps' rows (`sampling`) and host
            samples; `thinned` has sums of the other steps.
        steps: read only the steps from the first to the last given, and no sums.
        counts: fill `RankTimeline.counts`.

    Raises:
        DataError: there is no such file, nothing in it says whose it is, or it is of a newer version.
    """
    sample: StepSample | None = None

    def wanted(step: int) -> bool:
        inside = steps is None or steps[0] <= step <= steps[1]
        return inside and (sample is None or sample.wanted(step))

    records = _lines(path, wanted)
    started = next(records)
    timeline = RankTimeline(started)
    sample = StepSample(share_of_budget(started.size) if bounded and steps is None else None)
    timeline.steps, timeline.thinned, timeline.loss_ends = sample.steps, sample.sums, sample.loss_ends
    layouts: list[BucketLayout] = []  # waiting for the step they begin with
    for record in records:
        if isinstance(record, (StepRow, ThinnedRow)):
            first = record.step if isinstance(record, StepRow) else record.first_step
            timeline.layouts += [(first, layout) for layout in layouts]
            if bounded:
                del timeline.layouts[:-LAYOUTS_KEPT]
            layouts = []
            if counts:
                timeline.counts.take(record)
            if steps is None or (isinstance(record, StepRow) and steps[0] <= first <= steps[1]):
                sample.take(record)
        elif isinstance(record, BucketLayout):
            layouts = [*layouts[-LAYOUTS_KEPT:], record]
        elif isinstance(record, DevicePhases):
            if wanted(record.step):
                timeline.device_phases[record.step] = record.phases
        else:
            _keep(timeline, record, bounded=bounded)
    timeline.device_phases = {s: p for s, p in timeline.device_phases.items() if wanted(s)}
    timeline.halvings = sample.level
    return timeline


def read_tail(path: Path, byte_count: int) -> RankTimeline | None:
    """Read what stands in the last `byte_count` bytes of one rank's events, which may be growing.

    Returns None while nothing says yet whose they are. Raises `DataError` as `read_events` does.
    """
    try:
        with path.open("rb") as file:
            head = file.readline(_LONGEST_LINE)
            if not head.endswith(b"\n"):
                return None
            start = max(file.tell(), path.stat().st_size - byte_count)
            is_cut = start > file.tell()
            file.seek(start)
            lines = file.read(byte_count + 1).split(b"\n")[is_cut:-1]
    except OSError as problem:
        raise DataError(f"cannot read {path}: {problem}") from None
    version, started = _read_header(path, head.decode(errors="replace"))
    timeline = RankTimeline(started)
    for line in lines:
        try:
            values = json.loads(line)
            record = None if "generation" in values else _decode(values, version, None)
        except _UNREADABLE:
            continue  # of no use to who looks at the present
        if isinstance(record, StepRow):
            timeline.steps.append(record)
        elif isinstance(record, ThinnedRow):
            timeline.thinned.append(record)
        elif isinstance(record, DevicePhases):
            timeline.device_phases[record.step] = record.phases
        elif isinstance(record, Sample):
            timeline.samples.append(record)
    return timeline


def _keep(timeline: RankTimeline, record: Sample | Setup | Traffic | ClockOffset | str, *, bounded: bool) -> None:
    """Keep a record that belongs to no step."""
    if isinstance(record, Sample):
        timeline.samples.append(record)
        if bounded and len(timeline.samples) > SAMPLES_KEPT:
            del timeline.samples[::2]
    elif isinstance(record, Setup):
        room = SETUP_KEPT - len(timeline.setup)
        timeline.setup |= dict(itertools.islice(record.values.items(), max(0, room)))
    elif isinstance(record, Traffic):
        timeline.traffic.add(record)
    elif isinstance(record, ClockOffset):
        timeline.clock_offsets.append(record)
    else:
        timeline.skipped_lines += 1
        if len(timeline.skipped) < SKIPPED_KEPT:
            timeline.skipped.append(record)


def _why(problem: Exception) -> str:
    if isinstance(problem, KeyError):
        return f"{problem.args[0]} is missing" if problem.args else "something is missing"
    return str(problem) or type(problem).__name__


def _read_header(path: Path, line: str) -> tuple[int, Started]:
    if not line:
        raise DataError(f"{path} is empty: a rank first writes when it has taken some steps")
    try:
        values = json.loads(line)
        version = values.pop("version")
        if version > EVENTS_VERSION:
            raise DataError(
                f"{path}: events of version {version}, this farandole reads up to {EVENTS_VERSION}",
                remedy=upgrade_remedy(),
            )
        started = Started(**values)
        if not (isinstance(started.rank, int) and isinstance(started.size, int)):
            raise TypeError("rank and size must be whole numbers")
        if not (isinstance(started.host, str) and isinstance(started.clock, str)):
            raise TypeError("host and clock must be texts")
        float(started.begin_seconds)
    except _UNREADABLE as problem:
        raise DataError(f"{path}: the first line does not say whose events these are ({problem})") from None
    return version, started


_DECODERS: dict[str, Any] = {
    "step": rows.decode_step,
    "sample": rows.decode_sample,
    "buckets": rows.decode_layout,
    "setup": rows.decode_setup,
    "traffic": rows.decode_traffic,
    "clock": rows.decode_clock,
    "device": rows.decode_device_phases,
    "thinned": rows.decode_thinned,
}


def _decode(values: Any, version: int, wanted: Callable[[int], bool] | None) -> Record:
    if version > 1 and wanted is not None and "step" in values and not wanted(values["step"]):
        for exchange in values["exchanges"]:
            exchange.pop("buckets", None)
    if version == 1:
        return rows.decode_step_1(values)
    for key, decode in _DECODERS.items():
        if key in values:
            record: Record = decode(values)
            return record
    raise ValueError(f"a record of none of the kinds {', '.join(_DECODERS)}")
