"""What went over the network: bytes, how fast, and how near to the fastest that this link has shown.

When a bucket is on the wire says `observe.figures.step_parts`, to the diagnosis too: who waits for others sends
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...core.vocabulary.events import BucketFacts, BucketTimes
from ...core.vocabulary.units import format_bits_per_second, format_bytes
from ..figures.figures import median
from ..figures.step_parts import rows_by_step, wires_of
from ..records.rows import StepRow
from .content import (
    Block,
    Figures,
    Fold,
    Run,
    Section,
    Table,
    Text,
    milliseconds,
    percent,
    plural,
    seconds,
    table_of_links,
)

MOST_BUCKETS = 64
FASTEST = 0.95
"""The quantile of the buckets' rates that is called the link's best: one lucky bucket proves nothing."""
LEAST_BYTES = 65536
"""Smaller buckets take what the latency takes, whatever the rate."""


@dataclass(frozen=True)
class BucketFigures:
    """One bucket of a typical step: medians over ranks and steps."""

    sent_bytes: float
    queue_seconds: float
    """From being handed over until its turn."""
    wire_seconds: float
    """Once its turn had come on every rank and the bucket before it had arrived."""
    codec_seconds: float
    rounds: float

    @property
    def bytes_per_second(self) -> float:
        """Sent by a rank while it was its turn."""
        return self.sent_bytes / self.wire_seconds if self.wire_seconds > 0 else math.nan


def make(run: Run) -> Section | None:
    """Return the network's figures; None where nothing was sent."""
    rows = [row for own in run.counted for row in own]
    sent = [row.sent_bytes for row in rows]
    if len(run.timelines) < 1 or run.summary.size < 2 or not any(sent):
        return None
    figures = [("sent by a rank", format_bytes(sum(sent) / len(sent)), "a step")]
    measured = _measured(run)
    if measured is not None:
        figures.append(
            ("over the interfaces", f"{format_bytes(measured)}/s", "of the busiest host, by all its processes")
        )
    busy, rate, best = achieved(run.counted, one_clock=run.one_clock)
    blocks: list[Block] = []
    lead = ""
    route = _route(run)
    through = " through the memory of the host" if route == "shared" else ""
    if busy > 0 and math.isfinite(rate):
        figures.append(("on the wire", seconds(busy), "a step, median"))
        figures.append(
            ("achieved", format_bits_per_second(8 * rate), "by a rank, while something was on the wire")
        )
        if math.isfinite(best) and best > 0:
            figures.append(("best seen", format_bits_per_second(8 * best), "the fastest twentieth of the buckets"))
            figures.append(("share of the best", percent(min(1.0, rate / best)), "achieved / best seen"))
            lead = (
                f"A rank sends {format_bytes(sum(sent) / len(sent))} a step{through} at "
                f"{format_bits_per_second(8 * rate)}, {percent(min(1.0, rate / best))} of the best seen here."
            )
        link = link_bits_per_second(run)
        if link is not None and not through:
            figures.append(("link", format_bits_per_second(link), "as the driver of the slowest host's tells it"))
            share = percent(8 * rate / link)
            figures.append(("share of the link", share, "achieved by a rank / link; the ranks of a host share it"))
            lead += f" The link is one of {format_bits_per_second(link)}: {share} of what is physically possible."
    blocks.append(Figures(figures))
    links = table_of_links(run)
    if links is not None:
        blocks.append(links)
    buckets = bucket_figures(run.counted, one_clock=run.one_clock)
    if buckets:
        blocks.append(Fold(plural(len(buckets), "bucket"), [_table(run, buckets)]))
    else:
        blocks.append(Text("The times of single buckets were not recorded, so the rate is unknown.", quiet=True))
    return Section("network", "Network", blocks, lead)


def achieved(rows: Sequence[Sequence[StepRow]], *, one_clock: bool) -> tuple[float, float, float]:
    """Return (seconds a step with something on the wire, bytes/s meanwhile, best bytes/s of a bucket): medians.

    `rows` are by rank and step, bytes those that a rank sends. See [Note: when a bucket is on the wire].
    """
    busy, rates, single = [], [], []
    for here in rows_by_step(rows).values():
        known = [wire for wire in wires_of(here, one_clock=one_clock) if wire is not None]
        time = sum(wire.busy_seconds for wire in known)
        if time > 0:
            busy.append(time)
            sent_bytes = sum(b.sent_bytes for row in here for each in row.exchanges for b in each.buckets)
            rates.append(sent_bytes / len(here) / time)
        single += [
            sent / turn
            for sent, turn in _sent_and_turns(here, one_clock=one_clock)
            if sent >= LEAST_BYTES and turn > 0
        ]
    best = sorted(single)[int(FASTEST * (len(single) - 1))] if single else math.nan
    return median(busy) if busy else 0.0, median(rates), best


def _sent_and_turns(rows: Sequence[StepRow], *, one_clock: bool) -> list[tuple[float, float]]:
    """Return the bytes that a rank sent for each bucket of a step, and the seconds it was alone on the wire."""
    found = []
    for i, wire in enumerate(wires_of(rows, one_clock=one_clock)):
        for number, turn in enumerate(wire.serialized_seconds if wire is not None else ()):
            found.append((median([row.exchanges[i].buckets[number].sent_bytes for row in rows]), turn))
    return found


def link_bits_per_second(run: Run) -> float | None:
    """Return the speed of the slowest host's link; None where no driver tells it."""
    known = [
        median([sample.link_bits_per_second for sample in timeline.samples if sample.link_bits_per_second])
        for timeline in run.timelines
    ]
    return min((speed for speed in known if speed > 0), default=None)


def bucket_figures(rows: Sequence[Sequence[StepRow]], *, one_clock: bool) -> list[BucketFigures]:
    """Return the buckets of a typical exchange, in launch order; `rows` are by rank and step."""
    by_bucket: dict[int, list[BucketTimes]] = {}
    turns: dict[int, list[float]] = {}
    for own in rows:
        for row in own:
            for exchange in row.exchanges:
                for number, bucket in enumerate(exchange.buckets[:MOST_BUCKETS]):
                    by_bucket.setdefault(number, []).append(bucket)
    for here in rows_by_step(rows).values():
        for wire in wires_of(here, one_clock=one_clock):
            for number, turn in enumerate(wire.serialized_seconds if wire is not None else ()):
                turns.setdefault(number, []).append(turn)
    return [
        BucketFigures(
            median([b.sent_bytes for b in own]),
            median([b.begin_seconds - b.launch_seconds for b in own]),
            median(turns.get(number, [])),
            median([b.codec_seconds for b in own]),
            median([b.rounds for b in own]),
        )
        for number, own in sorted(by_bucket.items())
    ]


def _table(run: Run, buckets: Sequence[BucketFigures]) -> Table:
    facts = _layout(run)
    head = [
        "bucket",
        "codec",
        "first parameter",
        "sent",
        "queue, ms",
        "on the wire, ms",
        "codec, ms",
        "rounds",
        "rate",
    ]
    rows = []
    for number, bucket in enumerate(buckets):
        fact = facts[number] if number < len(facts) else None
        rows.append(
            [
                str(number), "unknown" if fact is None else str(fact.codec),
                str(fact.parameters[0]) if fact is not None and fact.parameters else "unknown",
                format_bytes(bucket.sent_bytes), milliseconds(bucket.queue_seconds),
                milliseconds(bucket.wire_seconds), milliseconds(bucket.codec_seconds), f"{bucket.rounds:.0f}",
                "-" if not math.isfinite(bucket.bytes_per_second)
                else format_bits_per_second(8 * bucket.bytes_per_second),
            ]
        )  # fmt: skip
    route = _route(run)
    note = "Medians over ranks and steps, in launch order."
    return Table(head, rows, texts=3, note=note + (f" Route: {route}." if route else ""))


def _route(run: Run) -> str:
    return next((str(layout.route) for t in run.timelines for _, layout in t.layouts[-1:]), "")


def _layout(run: Run) -> Sequence[BucketFacts]:
    for timeline in run.timelines:
        if timeline.layouts:
            return timeline.layouts[-1][1].buckets
    return ()


def _measured(run: Run) -> float | None:
    """Return the bytes a second sent over the interfaces of the busiest host, over the whole run."""
    rates = []
    for timeline in run.timelines:
        known = [s for s in timeline.samples if s.network_sent_bytes is not None and s.span_seconds > 0]
        span = sum(sample.span_seconds for sample in known)
        if span > 0:
            rates.append(sum(sample.network_sent_bytes or 0 for sample in known) / span)
    return max(rates, default=None) if any(rates) else None
