"""Charts as inline SVG: lines over steps, and stacked shares. Colours come from the page's style sheet.

Every chart is text of bounded size, whatever the number of steps: values are binned first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 220
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 10, 34
MOST_POINTS = 200


@dataclass(frozen=True)
class Axis:
    """Name, range and round numbers of one axis."""

    name: str
    low: float
    high: float
    ticks: Sequence[float]

    def place(self, value: float, first: float, last: float) -> float:
        """Return where `value` lies between the pixels `first` and `last`."""
        span = self.high - self.low
        return first + (value - self.low) / span * (last - first) if span else (first + last) / 2


@dataclass(frozen=True)
class Line:
    """A named line of (x, y) points; `style` is a class of the style sheet."""

    name: str
    points: Sequence[tuple[float, float]]
    style: str


@dataclass(frozen=True)
class Bar:
    """A stacked bar: a label, its parts in order, and the text of its tooltip."""

    label: str
    parts: Sequence[float]
    title: str


def binned(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """Return at most `most` points, each the mean of its neighbours; points that are no numbers are left out."""
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    each = max(1, -(-len(finite) // most))
    groups = [finite[i : i + each] for i in range(0, len(finite), each)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def line_chart(lines: Sequence[Line], *, x_name: str, y_name: str, from_zero: bool) -> str:
    """Return an SVG of lines over a common x; an empty text when no line has two points."""
    drawn = [Line(line.name, binned(line.points), line.style) for line in lines]
    drawn = [line for line in drawn if len(line.points) > 1]
    if not drawn:
        return ""
    xs = [x for line in drawn for x, _ in line.points]
    ys = [y for line in drawn for _, y in line.points]
    low_y = 0.0 if from_zero else min(ys)
    y_ticks = ticks(low_y, max(ys))
    across = Axis(x_name, min(xs), max(xs), ticks(min(xs), max(xs)))
    up = Axis(y_name, min(low_y, y_ticks[0]), max(*ys, y_ticks[-1]), y_ticks)
    body = [_grid(across, up)]
    for line in drawn:
        path = _path(line.points, across, up)
        body.append(
            f'<polyline class="line {line.style}" points="{path}"><title>{escape(line.name)}</title></polyline>'
        )
    return _svg("".join(body), HEIGHT, f"{y_name} over {x_name}")


def share_bars(bars: Sequence[Bar], styles: Sequence[str]) -> str:
    """Return an SVG of horizontal bars, each divided by its parts' shares."""
    row, gap, label = 22, 8, 120
    body = []
    for i, bar in enumerate(bars):
        y = i * (row + gap)
        total = sum(bar.parts) or 1.0
        body.append(
            f'<text class="label" x="{label - 8}" y="{y + 15}" text-anchor="end">{escape(bar.label)}</text>'
        )
        x = float(label)
        for part, style in zip(bar.parts, styles, strict=True):
            width = (WIDTH - label) * part / total
            body.append(f'<rect class="{style}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{row}"/>')
            if width > 44:
                text = f"{part / total:.0%}"
                body.append(f'<text class="inside" x="{x + width / 2:.1f}" y="{y + 15}">{text}</text>')
            x += width
        body.append(
            f'<rect class="hit" x="{label}" y="{y}" width="{WIDTH - label}" height="{row}">'
            f"<title>{escape(bar.title)}</title></rect>"
        )
    return _svg("".join(body), len(bars) * (row + gap), "where the time of a step went, by rank")


def stacked_area(
    steps: Sequence[float], parts: Sequence[Sequence[float]], styles: Sequence[str], *, y_name: str
) -> str:
    """Return an SVG of parts stacked over steps; `parts` holds one series a style. Empty below two steps."""
    series = [binned(list(zip(steps, values, strict=True))) for values in parts]
    if len(series[0]) < 2:
        return ""
    xs = [x for x, _ in series[0]]
    tops = [[0.0] * len(xs)]
    for values in series:
        tops.append([below + y for below, (_, y) in zip(tops[-1], values, strict=True)])
    y_ticks = ticks(0.0, max(tops[-1]))
    across = Axis("step", xs[0], xs[-1], ticks(xs[0], xs[-1]))
    up = Axis(y_name, 0.0, max(*tops[-1], y_ticks[-1]), y_ticks)
    body = []
    for below, above, style in zip(tops, tops[1:], styles, strict=False):
        edge = [(x, y) for x, y in zip(xs, above, strict=True)] + [
            (x, y) for x, y in zip(reversed(xs), reversed(below), strict=True)
        ]
        points = _path(edge, across, up)
        body.append(f'<polygon class="{style}" points="{points}"/>')
    body.append(_grid(across, up))
    return _svg("".join(body), HEIGHT, f"{y_name} over steps")


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return round numbers that span [low, high].

    >>> ticks(0, 10)
    [0.0, 2.5, 5.0, 7.5, 10.0]
    """
    if not high > low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / count
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * scale for factor in (1, 2, 2.5, 5, 10) if factor * scale >= rough * 0.999)
    first = math.floor(low / step + 1e-9)
    found = []
    while first * step <= high * (1 + 1e-9) + 1e-12:
        if first * step >= low - 1e-9 * abs(low):
            found.append(round(first * step, 12))
        first += 1
    return found or [low]


def _path(points: Sequence[tuple[float, float]], across: Axis, up: Axis) -> str:
    return " ".join(
        f"{across.place(x, LEFT, WIDTH - RIGHT):.1f},{up.place(y, HEIGHT - BOTTOM, TOP):.1f}" for x, y in points
    )


def _grid(across: Axis, up: Axis) -> str:
    parts = []
    for y in up.ticks:
        at = up.place(y, HEIGHT - BOTTOM, TOP)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{y:g}</text>')
    for x in across.ticks:
        at = across.place(x, LEFT, WIDTH - RIGHT)
        if LEFT - 1 <= at <= WIDTH - RIGHT + 1:
            parts.append(
                f'<text class="tick" x="{at:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{x:g}</text>'
            )
    middle, turned = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text class="axis" x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{escape(across.name)}</text>'
    )
    parts.append(
        f'<text class="axis" x="12" y="{turned}" text-anchor="middle" transform="rotate(-90 12 {turned})">'
        f"{escape(up.name)}</text>"
    )
    return "".join(parts)


def _svg(body: str, height: int, what: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(what)}">{body}</svg>'
