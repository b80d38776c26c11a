"""What ranks did at what time: a row a rank, a block an activity.

Below it what its accelerator did, where it has one, and a thin row for what was on the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ....core.vocabulary.units import format_seconds
from .frame import WIDTH, Label, apart, frame, number, shape
from .scale import tick_texts, ticks

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
        body += [_block(block, begin, span, top, BLOCK) for block in _inner_last(row.blocks)]
        body += [_block(block, begin, span, top + BLOCK + GAP, DEVICE) for block in _inner_last(row.device)]
        body += [_block(block, begin, span, top + BLOCK + GAP + lane, WIRE) for block in row.wire]
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


def _block(block: GanttSpan, begin: float, span: float, top: float, height: float) -> str:
    left = (block.begin_seconds - begin) / span * WIDTH
    width = max((block.end_seconds - block.begin_seconds) / span * WIDTH, 0.4)
    title = f"{block.name} {format_seconds(block.end_seconds - block.begin_seconds)}"
    return shape(
        "rect", title, class_=block.style, x=_fine(left), y=number(top), width=_fine(width), height=number(height)
    )


def _fine(value: float) -> str:
    """Write a coordinate fine enough to be looked at through the zoom."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
