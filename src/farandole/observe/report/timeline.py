"""What all ranks did, on one clock: a typical step and the slowest ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from ...core.vocabulary.events import EXCHANGE, STEP_PHASES, Phase
from ...core.vocabulary.units import format_seconds
from ..figures.figures import median
from ..figures.step_parts import WireTime, waits_of, wires_of
from ..records.rows import StepRow
from .charts import WIDTH, Label, apart, frame, number, shape, tick_texts, ticks
from .content import Block as PageBlock
from .content import Chart, Run, Section, seconds

WAIT = "waiting for the exchange"
MOST_RANKS = 16
SLOWEST = 2
MOST_BLOCKS = 1800
"""In all charts together: what bounds this part of the page."""


def make(run: Run) -> Section | None:
    """Return the timelines; None without a step that all ranks have, or before version 2 of the records."""
    by_step = common_rows(run)
    if not by_step:
        return None
    typical, slowest = choose(by_step)
    charts: list[PageBlock] = []
    steps = [typical, *slowest]
    budget = MOST_BLOCKS // len(steps)
    names: set[str] = set()
    for step in steps:
        rows = by_step[step]
        kind = "A typical step" if step == typical else "A slow step"
        chart = _chart(run, rows, budget)
        names |= {phase.name for row in rows for phase in row.phases}
        charts.append(Chart(f"{kind}: step {step}, {seconds(_length(rows))}", chart))
    if any(row.exchanges for step in steps for row in by_step[step]):
        names.add(EXCHANGE)
    legend = [(style_of(name), WAIT if name == EXCHANGE else name) for name in STEP_PHASES if name in names]
    if any(style_of(name) == "phase-pause" for name in names):
        legend.append(("phase-pause", "pauses"))
    if any(e.buckets for step in steps for row in by_step[step] for e in row.exchanges):
        legend.append(("wire", "a bucket on the wire"))
    charts.insert(0, Chart("", Markup(""), legend))
    alone = len(run.timelines) == 1
    lead = (
        "Blocks are what the rank does."
        if alone
        else "All ranks on one clock. Wide blocks are what a rank does, thin ones below its buckets on the wire, "
        "once every rank sends them."
    )
    if any(timeline.device_phases.get(step) for timeline in run.timelines for step in steps):
        lead += " Between them what its accelerator did, later than it was told to."
    if not run.one_clock:
        lead = "Every rank begins at 0: the hosts' clocks cannot be compared. Thin blocks are buckets on the wire."
    if len(run.timelines) > MOST_RANKS:
        lead += f" {MOST_RANKS} of {len(run.timelines)} ranks, the slowest among them."
    return Section("timeline", "Timeline", charts, lead)


def common_rows(run: Run) -> dict[int, list[StepRow]]:
    """Return the rows of all ranks by step, of steps after the warm-up that every rank has with its phases."""
    if not run.timelines:
        return {}
    by_rank = [{row.step: row for row in own if row.phases} for own in run.counted]
    common = set.intersection(*(set(own) for own in by_rank))
    return {step: [own[step] for own in by_rank] for step in sorted(common)}


def choose(by_step: dict[int, list[StepRow]]) -> tuple[int, list[int]]:
    """Return the step whose length is the middle one, and the slowest ones when they are slower."""
    lengths = {step: _length(rows) for step, rows in by_step.items()}
    middle = median(list(lengths.values()))
    typical = min(lengths, key=lambda step: (abs(lengths[step] - middle), step))
    slowest = sorted(lengths, key=lambda step: (-lengths[step], step))[:SLOWEST]
    return typical, [step for step in slowest if lengths[step] > 1.1 * lengths[typical]]


def _length(rows: Sequence[StepRow]) -> float:
    return max(row.end_seconds - row.begin_seconds for row in rows)


def _chart(run: Run, rows: Sequence[StepRow], budget: int) -> Markup:
    shown = _shown(rows)
    each = max(8, budget // max(1, len(shown)))
    drawn = []
    wires = wires_of(rows, one_clock=True) if run.one_clock else []
    for i in shown:
        row = rows[i]
        shift = 0.0 if run.one_clock else row.begin_seconds
        blocks = [_block(phase, shift) for phase in row.phases]
        blocks += [_wait(wait.begin - shift, wait.end - shift) for wait in waits_of(row)]
        wire = _on_the_wire(row, wires, shift)
        device = [
            replace(block, name=f"{block.name}, on the accelerator")
            for block in (_block(phase, shift) for phase in run.timelines[i].device_phases.get(row.step, ()))
        ]
        blocks = _longest(blocks, each)
        device = _longest(device, max(4, each - len(blocks)))
        wire = _longest(wire, max(4, each - len(blocks) - len(device)))
        drawn.append(Row(f"rank {run.ranks[i]}", blocks, wire, device))
    return gantt(drawn, says="what each rank did during the step")


def _on_the_wire(row: StepRow, wires: Sequence[WireTime | None], shift: float) -> list[GanttSpan]:
    """Return a rank's buckets, from when their turn has come on the last rank. See `figures.step_parts`."""
    found: list[GanttSpan] = []
    for i, exchange in enumerate(row.exchanges):
        wire = wires[i] if i < len(wires) else None
        for n, bucket in enumerate(exchange.buckets):
            since = bucket.begin_seconds if wire is None else max(bucket.begin_seconds, wire.spans[n][0])
            begin, end = min(since, bucket.end_seconds) - shift, bucket.end_seconds - shift
            number = len(found)
            found.append(GanttSpan(f"bucket {number}, on the wire", begin, end, f"wire wire-{number % 2}"))
    return found


def _shown(rows: Sequence[StepRow]) -> list[int]:
    """Return which ranks to draw: spread over all, with those that wait least, for which the others wait."""
    if len(rows) <= MOST_RANKS:
        return list(range(len(rows)))
    waits = [sum(e.wait_end_seconds - e.wait_begin_seconds for e in row.exchanges) for row in rows]
    half = MOST_RANKS // 2
    chosen = set(sorted(range(len(rows)), key=lambda i: waits[i])[:half])
    spread = [round(k * (len(rows) - 1) / (MOST_RANKS - 1)) for k in range(MOST_RANKS)]
    for i in spread:
        if len(chosen) < MOST_RANKS:
            chosen.add(i)
    return sorted(chosen)


def _longest(blocks: list[GanttSpan], most: int) -> list[GanttSpan]:
    return sorted(blocks, key=lambda b: b.begin_seconds - b.end_seconds)[:most]


def _block(phase: Phase, shift: float) -> GanttSpan:
    return GanttSpan(phase.name, phase.begin_seconds - shift, phase.end_seconds - shift, style_of(phase.name))


def _wait(begin: float, end: float) -> GanttSpan:
    return GanttSpan(WAIT, begin, end, style_of(EXCHANGE))


def style_of(name: str) -> str:
    """Return the class of a phase's colour."""
    return f"phase-{name}" if name in STEP_PHASES else "phase-pause"


# What ranks did at what time: a row a rank, a block an activity.
#
# Below it what its accelerator did, where it has one, and a thin row for what was on the wire.


ROW, BLOCK, DEVICE, WIRE, GAP = 34, 18, 12, 7, 2


@dataclass(frozen=True)
class GanttSpan:
    """Something that went on for a time."""

    name: str
    begin_seconds: float
    end_seconds: float
    style: str


@dataclass(frozen=True)
class Row:
    """One rank."""

    name: str
    blocks: Sequence[GanttSpan]
    wire: Sequence[GanttSpan] = ()
    device: Sequence[GanttSpan] = ()
    """What its accelerator did."""


def gantt(rows: Sequence[Row], *, says: str) -> Markup:
    """Return the rows on one clock that starts at 0 with the earliest block. Nothing without a block."""
    every = [block for row in rows for block in (*row.blocks, *row.wire, *row.device)]
    if not every:
        return Markup("")
    begin = min(block.begin_seconds for block in every)
    span = max(block.end_seconds for block in every) - begin or 1e-9
    body = []
    lane = DEVICE + GAP if any(row.device for row in rows) else 0
    height = ROW + lane
    for r, row in enumerate(rows):
        top = r * height + 4
        body += [_bar(block, begin, span, top, BLOCK) for block in _inner_last(row.blocks)]
        body += [_bar(block, begin, span, top + BLOCK + GAP, DEVICE) for block in _inner_last(row.device)]
        body += [_bar(block, begin, span, top + BLOCK + GAP + lane, WIRE) for block in row.wire]
    unit, name = (1e3, "ms") if span < 10 else (1.0, "s")
    places = ticks(0.0, span * unit)
    across = [
        Label(place / (span * unit), f"{text} {name}" if place else text)
        for place, text in zip(places, tick_texts(places), strict=True)
    ]
    up = [Label((r * height + 4 + BLOCK / 2) / (height * len(rows)), row.name) for r, row in enumerate(rows)]
    chart = frame("".join(body), height * len(rows), says=says, up=up, across=apart(across), style="gantt")
    return Markup('<div class="zoom" data-span="{:.6g}" data-unit="{}">{}</div>').format(span * unit, name, chart)


def _inner_last(blocks: Sequence[GanttSpan]) -> list[GanttSpan]:
    return sorted(blocks, key=lambda b: (b.begin_seconds, -b.end_seconds))


def _bar(block: GanttSpan, begin: float, span: float, top: float, height: float) -> str:
    left = (block.begin_seconds - begin) / span * WIDTH
    width = max((block.end_seconds - block.begin_seconds) / span * WIDTH, 0.4)
    title = f"{block.name} {format_seconds(block.end_seconds - block.begin_seconds)}"
    return shape(
        "rect", title, class_=block.style, x=_fine(left), y=number(top), width=_fine(width), height=number(height)
    )


def _fine(value: float) -> str:
    """Write a coordinate fine enough to be looked at through the zoom."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
