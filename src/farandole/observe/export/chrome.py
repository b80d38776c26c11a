"""All ranks as one trace that Perfetto and chrome://tracing show: a process a rank, one clock.

Lanes: ``steps`` (one span a step), ``phases`` (what the rank was busy with; nested), ``network 0``, ``network 1``,
... (a bucket from its launch to its sum, in it its time in the queue and on the wire; as many lanes as buckets
were under way at once). Besides: arrows from the rank that launched its last bucket last to those that waited for
it, and counters of loss and host facts.

[Note: nothing is number 0] Perfetto takes process and thread 0 for the kernel's idle task, and shows it so.
Here rank 0 is process 1, and lanes count from 1; names and order are those of the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...core.vocabulary.events import DATA, EXCHANGE, BucketTimes
from ..figures.figures import split_wait
from ..records.rows import ExchangeRow, StepRow
from ..records.timeline_reader import RankTimeline
from .source import ExportSource, rows_by_step
from .trace_file import TraceEvent, make_event, name_events, write_trace

STEPS = "steps"
PHASES = "phases"
COMPUTE = "compute"
"""What records of version 1 know of forward, backward and optimizer."""
_LANES = {STEPS: 1, PHASES: 2}
_FIRST_NETWORK = 3
ARROW_SECONDS = 0.0005
ARROW_SHARE = 0.02
"""A wait for another rank gets an arrow when it is longer than both: this, and this share of the step."""
_COUNTERS = [
    ("CPU (cores)", "process", "process_cores", 1),
    ("machine (share)", "busy", "machine_share", 1),
    ("memory (MiB)", "resident", "resident_bytes", 2**20),
    ("accelerator (share)", "busy", "gpu_share", 1),
    ("accelerator memory (MiB)", "used", "gpu_used_bytes", 2**20),
]
"""Facts of the host: name, name of the value, where a sample has it, and its unit."""


@dataclass(frozen=True)
class Span:
    """Something that took time, on the clock of its row."""

    lane: str
    name: str
    begin_seconds: float
    end_seconds: float
    args: Mapping[str, Any] = field(default_factory=dict)


def write_chrome(records: ExportSource, out: Path) -> list[Path]:
    """Write the trace to `out` (compressed when it ends with ``.gz``); return what was written."""
    head = {
        "displayTimeUnit": "ms",
        "otherData": {
            "run": records.name,
            "ranks": records.size,
            "start_time_since_epoch_in_micros": round(records.epoch_seconds * 1e6),
            "notes": records.notes,
        },
    }
    return [write_trace(out, trace_events(records), head)]


def trace_events(records: ExportSource) -> Iterator[TraceEvent]:
    """Yield the events: of each rank its name, its spans and its counters; then the arrows between ranks."""
    for timeline in records.timelines:
        started, zero = timeline.started, records.zero_of(timeline)
        name = f"rank {started.rank} on {started.host}"
        name += " (its own clock)" if started.rank in records.incomparable else ""
        yield from name_events("process", {"pid": _process(started.rank)}, started.rank, name=name)
        yield from _spans(timeline, zero)
        yield from _counters(timeline, zero)
    yield from _arrows(records)


def _spans(timeline: RankTimeline, zero: float) -> Iterator[TraceEvent]:
    process, named = _process(timeline.started.rank), set[int]()
    for span in _all_spans(timeline):
        kind, _, number = span.lane.partition(" ")
        lane = _FIRST_NETWORK + int(number) if number else _LANES[kind]
        if lane not in named:
            named.add(lane)
            yield from name_events("thread", {"pid": process, "tid": lane}, lane, name=span.lane)
        begin, length = span.begin_seconds - zero, max(0.0, span.end_seconds - span.begin_seconds)
        on = {"cat": kind, "tid": lane, "dur": micros(length), "args": _finite(span.args)}
        yield make_event("X", span.name, process, micros(begin), **on)


def _all_spans(timeline: RankTimeline) -> Iterator[Span]:
    for row in timeline.steps:
        known = {"loss": row.loss, "samples": row.samples or None, "tokens": row.tokens}
        args = {name: value for name, value in known.items() if value is not None}
        yield Span(STEPS, f"step {row.step}", row.begin_seconds, row.end_seconds, args)
        yield from _phases(row)
    yield from _network(timeline)


def _phases(row: StepRow) -> list[Span]:
    """Return what the rank was busy with, each inside the one around it, in order of begin."""
    spans = [Span(PHASES, phase.name, phase.begin_seconds, phase.end_seconds) for phase in row.phases]
    for exchange in row.exchanges:
        args = {"sent_bytes": exchange.sent_bytes, "buckets": len(exchange.launch_seconds)}
        spans.append(Span(PHASES, EXCHANGE, exchange.wait_begin_seconds, exchange.wait_end_seconds, args))
    if not row.phases:
        spans += _version_1(row)
    return nested(spans)


def _version_1(row: StepRow) -> list[Span]:
    """Version 1 knows how long the data took, not when: it is drawn at the step's begin."""
    at = min(row.begin_seconds + row.data_seconds, row.end_seconds)
    spans = [Span(PHASES, DATA, row.begin_seconds, at)] if at > row.begin_seconds else []
    for exchange in row.exchanges:
        if exchange.wait_begin_seconds > at:
            spans.append(Span(PHASES, COMPUTE, at, exchange.wait_begin_seconds))
        at = max(at, exchange.wait_end_seconds)
    return [*spans, Span(PHASES, COMPUTE, at, row.end_seconds)] if row.end_seconds > at else spans


def _network(timeline: RankTimeline) -> Iterator[Span]:
    """Yield all buckets of a rank, those that overlap on different lanes, each with its queue and wire."""
    free: list[float] = []
    for row in timeline.steps:
        for number, exchange in enumerate(row.exchanges):
            for launch, position, begin, end, facts in sorted(_buckets(exchange), key=lambda bucket: bucket[:2]):
                lane = next((i for i, at in enumerate(free) if at <= launch), len(free))
                free[lane : lane + 1] = [end]
                args = {"step": row.step, "exchange": number, **facts}
                on = f"network {lane}"
                yield Span(on, f"bucket {position}", launch, end, args)
                if begin > launch:
                    yield Span(on, "queue", launch, begin)
                if exchange.buckets:
                    yield Span(on, "wire", begin, end)


def _buckets(exchange: ExchangeRow) -> Iterator[tuple[float, int, float, float, dict[str, Any]]]:
    """Yield of each bucket its launch, its position, the begin and the end of its travel, and facts.

    Without times of its own (version 1) it ends with the exchange.
    """
    if not exchange.buckets:
        for i, at in enumerate(exchange.launch_seconds):
            yield at, i, at, max(at, exchange.wait_end_seconds), {}
    for i, bucket in enumerate(exchange.buckets):
        begin = max(bucket.launch_seconds, bucket.begin_seconds)
        yield bucket.launch_seconds, i, begin, max(begin, bucket.end_seconds), _facts(bucket)


def _facts(bucket: BucketTimes) -> dict[str, Any]:
    facts: dict[str, Any] = {"bytes": bucket.nbytes, "sent_bytes": bucket.sent_bytes, "rounds": bucket.rounds}
    if bucket.codec_seconds:
        facts["codec_ms"] = round(bucket.codec_seconds * 1e3, 3)
    if bucket.last_ready_seconds is not None and bucket.first_ready_seconds is not None:
        facts["filled_ms"] = round((bucket.last_ready_seconds - bucket.first_ready_seconds) * 1e3, 3)
    return facts


def nested(spans: Iterable[Span]) -> list[Span]:
    """Return spans in order of begin, each cut where the one around it ends: viewers draw nothing else.

    >>> [s.end_seconds for s in nested([Span("", "a", 0.0, 2.0), Span("", "b", 1.0, 3.0)])]
    [2.0, 2.0]
    """
    found: list[Span] = []
    ends: list[float] = []
    for span in sorted(spans, key=lambda span: (span.begin_seconds, -span.end_seconds)):
        while ends and ends[-1] <= span.begin_seconds:
            ends.pop()
        end = max(span.begin_seconds, min([span.end_seconds, *ends[-1:]]))
        ends.append(end)
        found.append(replace(span, end_seconds=end))
    return found


def _process(rank: int) -> int:
    """Return the number of a rank's process. See [Note: nothing is number 0]."""
    return rank + 1


def _counters(timeline: RankTimeline, zero: float) -> Iterator[TraceEvent]:
    process = _process(timeline.started.rank)
    for row in timeline.steps:
        if row.loss is not None and math.isfinite(row.loss):
            yield make_event("C", "loss", process, micros(row.end_seconds - zero), args={"loss": row.loss})
    for sample in timeline.samples:
        for name, key, attribute, unit in _COUNTERS:
            if (value := getattr(sample, attribute)) is not None:
                yield make_event("C", name, process, micros(sample.at_seconds - zero), args={key: value / unit})


def _arrows(records: ExportSource) -> Iterator[TraceEvent]:
    """From the last launch of the last rank to the end of the wait of each that waited for it."""
    timelines = [t for t in records.timelines if t.started.rank not in records.incomparable]
    zero, number = records.begin_seconds, 0
    for step, rows in rows_by_step(timelines).items():
        for i in range(max(len(row.exchanges) for _, row in rows)):
            sent = [(rank, row, row.exchanges[i]) for rank, row in rows if i < len(row.exchanges)]
            launches = {rank: max(own.launch_seconds) for rank, _, own in sent if own.launch_seconds}
            last = max(launches, key=lambda rank: launches[rank], default=None)
            for rank, row, own in sent:
                if last is None or rank == last or rank not in launches:
                    continue
                begin, end = own.wait_begin_seconds, own.wait_end_seconds
                waited, _ = split_wait(begin, end, launches[last])
                if waited > max(ARROW_SECONDS, ARROW_SHARE * (row.end_seconds - row.begin_seconds)):
                    number += 1
                    name = f"rank {rank} waited {waited * 1e3:.1f} ms for rank {last}"
                    arrow = {"cat": "waiting", "id": number, "tid": _LANES[STEPS], "args": {"step": step}}
                    at = launches[last] - zero
                    yield make_event("s", name, _process(last), micros(at), **arrow)
                    # Ends inside the step, not on its border, where it would belong to the next one.
                    at = max(at, end - zero - 1e-6)
                    yield make_event("f", name, _process(rank), micros(at), bp="e", **arrow)


def _finite(args: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in args.items()}


def micros(seconds: float) -> float:
    """Return microseconds with nanoseconds behind the point, as viewers take them."""
    return round(seconds * 1e6, 3)
