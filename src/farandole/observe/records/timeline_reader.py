"""Reading the events of one rank from disk, also after a kill. Format: `docs/notes/records.md`.

The first line says whose it is and in which version; each further line is one step or another record (`rows`).
Files of version 1 are read too: they know the data's and the exchange's time and no other phase.

[Note: which steps are kept] Whole rows are kept until they weigh more than a budget; then every second step is
dropped, and again. A step's turn comes by a hash of its number, which is the same on all ranks and beats no
rhythm: of steps with a pause every hundred steps, the sample has its fair share. What is dropped is added to the
sums of the steps around it, so that counts of all steps stay exact.
"""

from __future__ import annotations

import itertools
import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ...core.vocabulary.errors import DataError
from ...core.vocabulary.events import (
    EVENTS_VERSION,
    OTHER,
    PIPELINE_WAIT,
    STEP_PHASES,
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
from ...core.vocabulary.text import upgrade_remedy
from . import rows
from .line_file import add_up, merge
from .rows import StepRow, ThinnedRow, step_seconds

# Traffic of a rank to other hosts by link, as the kernel counted it, and the rate of each link in use.
#
# [Note: bytes over busy time] The kernel knows for how long a connection had something on its way, and how much of
# it arrived (`tcp_info`, tcp(7)). In a ring all ranks send the same and wait for the slowest, so their steps and
# their bytes are alike; but a fast link is idle most of the time, and a slow one never. The quotient is the rate
# of a link that is slow, and above it for all others: in this alone they differ. Time in which the other process
# did not read is left out, or a slow rank would look like a slow link.


MOST_LINKS = 4096
"""Most links that are held of one rank."""
_LEAST_PART = 0.1
"""Fraction of the busiest link's bytes; less is not an exchange of gradients."""


@dataclass
class RankTraffic:
    """What one rank sent: bytes and busy seconds by (own address, address of the other host)."""

    sums: dict[tuple[str, str], tuple[int, float]] = field(default_factory=dict)

    seconds: float = 0.0
    """Time in which they were counted."""

    def add(self, traffic: Traffic) -> None:
        """Count what was sent since the previous such record."""
        self.seconds += traffic.span_seconds
        for link in traffic.links:
            key = (link.own_address, link.peer_address)
            if key not in self.sums and len(self.sums) >= MOST_LINKS:
                continue
            sent, busy = self.sums.get(key, (0, 0.0))
            self.sums[key] = (sent + link.sent_bytes, busy + link.busy_seconds)

    @property
    def own_addresses(self) -> set[str]:
        """Addresses of this rank's host that it sent from."""
        return {own for own, _ in self.sums}


class _Timeline(Protocol):
    started: Started
    traffic: RankTraffic


@dataclass(frozen=True)
class HostTraffic:
    """What one host sent to another, over all connections of their ranks."""

    source: str
    target: str
    sent_bytes: int
    bytes_per_second: float
    """Rate of a connection while data is in flight: see [Note: bytes over busy time]."""
    busy_share: float
    """Fraction of a rank's time with data in flight."""


def links_between_hosts(timelines: Sequence[_Timeline]) -> list[HostTraffic]:
    """Return the links that carried what ranks exchange; none where nothing was counted."""
    host_of = {address: each.started.host for each in timelines for address in each.traffic.own_addresses}
    sums: dict[tuple[str, str], tuple[int, float]] = {}
    for each in timelines:
        for (own, peer), (sent, busy) in each.traffic.sums.items():
            target = host_of.get(peer)
            if target is not None and target != host_of[own]:
                so_far = sums.get((host_of[own], target), (0, 0.0))
                sums[host_of[own], target] = (so_far[0] + sent, so_far[1] + busy)
    most = max((sent for sent, _ in sums.values()), default=0)
    lasted = max((each.traffic.seconds for each in timelines), default=0.0)
    ranks = Counter(each.started.host for each in timelines)
    return [
        HostTraffic(source, target, sent, sent / busy, busy / lasted / ranks[source])
        for (source, target), (sent, busy) in sums.items()
        if busy > 0 and lasted > 0 and sent >= _LEAST_PART * most
    ]


# The steps of a run of any length in bounded memory: a uniform sample of rows, and sums of the rows between.

BUDGET = 400_000
"""Buckets, phases and exchanges of all ranks together that are held in memory."""
LEAST_STEPS = 64
_HASH = 2654435761


class LoggedLoss(NamedTuple):
    """The loss of a step."""

    step: int
    loss: float
    samples: int


@dataclass
class StepSample:
    """The steps of one rank, as much of them as `budget` allows."""

    budget: int | None
    """Buckets, phases and exchanges to hold. None: all."""
    steps: list[StepRow] = field(default_factory=list)
    sums: list[ThinnedRow] = field(default_factory=list)
    """Sums of the steps that are not in `steps`, in order, at most one between two of those."""
    loss_ends: list[LoggedLoss] = field(default_factory=list)
    """The first and the last loss of all steps."""
    level: int = 0
    """Steps were halved so many times."""
    _held: int = 0
    _open: bool = False
    """Whether the last of `sums` comes after the last of `steps`."""

    def wanted(self, step: int) -> bool:
        """Return whether a step will be kept whole."""
        return turn(step, self.level)

    def take(self, row: StepRow | ThinnedRow) -> None:
        """Take the next step, or sums of steps."""
        if isinstance(row, StepRow) and row.loss is not None:
            self.loss_ends[1:] = [LoggedLoss(row.step, row.loss, row.samples)]
        if isinstance(row, ThinnedRow) or not self.wanted(row.step):
            self._add(row)
            return
        self.steps.append(row)
        self._open = False
        self._held += weight(row)
        while self.budget is not None and self._held > self.budget and len(self.steps) > LEAST_STEPS:
            self._halve()

    def _add(self, row: StepRow | ThinnedRow) -> None:
        if self._open:
            last = self.sums[-1]
            self.sums[-1] = merge(last, row) if isinstance(row, ThinnedRow) else add_up(last, row)
        else:
            self.sums.append(row if isinstance(row, ThinnedRow) else add_up(None, row))
            self._open = True

    def _halve(self) -> None:
        self.level += 1
        rows: list[StepRow | ThinnedRow] = [*self.sums, *self.steps]
        rows.sort(key=lambda row: row.begin_seconds)
        self.steps.clear()
        self.sums.clear()
        self._open = False
        for row in rows:
            if isinstance(row, StepRow) and self.wanted(row.step):
                self.steps.append(row)
                self._open = False
            else:
                self._add(row)
        self._held = sum(weight(row) for row in self.steps)


def turn(step: int, level: int) -> bool:
    """Return whether a step is kept after so many halvings. See [Note: which steps are kept]."""
    return level == 0 or (step * _HASH) % 2**32 < 2 ** (32 - min(level, 32))


def weight(row: StepRow) -> int:
    """Return what a row counts of a budget."""
    return 1 + len(row.phases) + sum(1 + len(exchange.buckets) for exchange in row.exchanges)


def share_of_budget(ranks: int) -> int:
    """Return what one of so many ranks may hold."""
    return max(1, BUDGET // max(1, ranks))


# Counts over all steps of a rank, also those without a row: lengths, and pauses, which are rare or small.

LENGTHS_KEPT = 200_000
PAUSES_KEPT = 20_000


@dataclass
class StepCounts:
    """Sums and lists over the steps of one rank, in bounded memory."""

    lengths: array[float] = field(default_factory=lambda: array("d"))
    """Seconds of each step in `numbers`."""
    numbers: array[int] = field(default_factory=lambda: array("q"))
    pauses: dict[str, dict[int, float]] = field(default_factory=dict)
    """By name: step and seconds, of steps with a pause."""
    thinned_pauses: dict[str, float] = field(default_factory=dict)
    """By name: seconds in steps without a row of their own."""

    def take(self, row: StepRow | ThinnedRow) -> None:
        """Count one more row."""
        if isinstance(row, StepRow):
            self._take_step(row)
            return
        for name, seconds in row.seconds.items():
            if _is_pause(name):
                self.thinned_pauses[name] = self.thinned_pauses.get(name, 0.0) + seconds

    def _take_step(self, row: StepRow) -> None:
        if len(self.lengths) < LENGTHS_KEPT:
            self.lengths.append(row.end_seconds - row.begin_seconds)
            self.numbers.append(row.step)
        if all(phase.name in STEP_PHASES for phase in row.phases) and not row.more_seconds:
            return
        for name, seconds in step_seconds(row).items():
            if _is_pause(name) and seconds > 0:
                by_step = self.pauses.setdefault(name, {})
                if len(by_step) < PAUSES_KEPT:
                    by_step[row.step] = seconds


def _is_pause(name: str) -> bool:
    return name not in STEP_PHASES and name not in (OTHER, PIPELINE_WAIT)


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
    """Measured by the first rank of each host but rank 0's; `clock` puts all ranks on one clock."""
    setup: dict[str, SetupValue] = field(default_factory=dict)
    """Facts about the training, the newest of each name (`core.vocabulary.events.Setup`)."""
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
        bounded: hold a fair sample of what a long run has too much of, its steps' rows (`StepSample`) and host
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
