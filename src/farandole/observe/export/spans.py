"""Converts a step's row to spans on tracks, for every trace format. Pure functions.

Lanes: ``steps`` (one span a step), ``phases`` (what the rank was busy with; nested), ``network 0``, ``network 1``,
... (a bucket from its launch to its sum, in it its time in the queue and on the wire; as many lanes as buckets
were under way at once).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...core.vocabulary.events import DATA, EXCHANGE
from ..format.rows import ExchangeRow, StepRow
from ..read.timeline_reader import RankTimeline

STEPS = "steps"
PHASES = "phases"
COMPUTE = "compute"
"""What records of version 1 know of forward, backward and optimizer."""
QUEUE = "queue"
WIRE = "wire"


@dataclass(frozen=True)
class Span:
    """Something that took time, on the clock of its row."""

    lane: str
    name: str
    begin_seconds: float
    end_seconds: float
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BucketSpan:
    """One bucket under way. Without times of its own (version 1) it ends with the exchange."""

    position: int
    """In launch order."""
    launch_seconds: float
    begin_seconds: float
    end_seconds: float
    args: Mapping[str, Any] = field(default_factory=dict)


def step_span(row: StepRow) -> Span:
    """Return the step itself."""
    known = {"loss": row.loss, "samples": row.samples or None, "tokens": row.tokens}
    args = {name: value for name, value in known.items() if value is not None}
    return Span(STEPS, f"step {row.step}", row.begin_seconds, row.end_seconds, args)


def phase_spans(row: StepRow) -> list[Span]:
    """Return what the rank was busy with, each inside the one around it, in order of begin."""
    spans = [Span(PHASES, phase.name, phase.begin_seconds, phase.end_seconds) for phase in row.phases]
    spans += [_wait(exchange) for exchange in row.exchanges]
    if not row.phases:
        spans += _version_1(row)
    return nested(spans)


def _wait(exchange: ExchangeRow) -> Span:
    args = {"sent_bytes": exchange.sent_bytes, "buckets": len(exchange.launch_seconds)}
    return Span(PHASES, EXCHANGE, exchange.wait_begin_seconds, exchange.wait_end_seconds, args)


def _version_1(row: StepRow) -> list[Span]:
    """Version 1 knows how long the data took, not when: it is drawn at the step's begin."""
    at = min(row.begin_seconds + row.data_seconds, row.end_seconds)
    spans = [Span(PHASES, DATA, row.begin_seconds, at)] if at > row.begin_seconds else []
    for exchange in row.exchanges:
        if exchange.wait_begin_seconds > at:
            spans.append(Span(PHASES, COMPUTE, at, exchange.wait_begin_seconds))
        at = max(at, exchange.wait_end_seconds)
    return [*spans, Span(PHASES, COMPUTE, at, row.end_seconds)] if row.end_seconds > at else spans


def bucket_spans(exchange: ExchangeRow) -> list[BucketSpan]:
    """Return the buckets of one exchange."""
    if not exchange.buckets:
        end = exchange.wait_end_seconds
        return [BucketSpan(i, at, at, max(at, end)) for i, at in enumerate(exchange.launch_seconds)]
    spans = []
    for i, bucket in enumerate(exchange.buckets):
        args: dict[str, Any] = {"bytes": bucket.nbytes, "sent_bytes": bucket.sent_bytes, "rounds": bucket.rounds}
        if bucket.codec_seconds:
            args["codec_ms"] = round(bucket.codec_seconds * 1e3, 3)
        if bucket.last_ready_seconds is not None and bucket.first_ready_seconds is not None:
            args["filled_ms"] = round((bucket.last_ready_seconds - bucket.first_ready_seconds) * 1e3, 3)
        begin = max(bucket.launch_seconds, bucket.begin_seconds)
        spans.append(BucketSpan(i, bucket.launch_seconds, begin, max(begin, bucket.end_seconds), args))
    return spans


def network_spans(timeline: RankTimeline) -> Iterator[Span]:
    """Yield all buckets of a rank, those that overlap on different lanes, each with its queue and wire."""
    free: list[float] = []
    for row in timeline.steps:
        for number, exchange in enumerate(row.exchanges):
            for bucket in sorted(bucket_spans(exchange), key=lambda bucket: bucket.launch_seconds):
                lane = next((i for i, at in enumerate(free) if at <= bucket.launch_seconds), len(free))
                free[lane:lane + 1] = [bucket.end_seconds]  # fmt: skip
                args = {"step": row.step, "exchange": number, **bucket.args}
                name, on = f"bucket {bucket.position}", f"network {lane}"
                yield Span(on, name, bucket.launch_seconds, bucket.end_seconds, args)
                if bucket.begin_seconds > bucket.launch_seconds:
                    yield Span(on, QUEUE, bucket.launch_seconds, bucket.begin_seconds)
                if exchange.buckets:
                    yield Span(on, WIRE, bucket.begin_seconds, bucket.end_seconds)


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
        found.append(span if end == span.end_seconds else replace(span, end_seconds=end))
    return found


def launch_seconds(rows: Sequence[tuple[int, StepRow]], exchange: int) -> dict[int, list[float]]:
    """Return by rank when it launched the buckets of one exchange of a step."""
    return {
        rank: list(row.exchanges[exchange].launch_seconds)
        for rank, row in rows
        if exchange < len(row.exchanges) and row.exchanges[exchange].launch_seconds
    }
