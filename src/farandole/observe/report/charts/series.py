"""Charts over steps or time: lines, a band with its mean, and parts stacked on each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from .frame import WIDTH, Label, apart, frame, grid, number, shape
from .scale import Scale, tick_texts, ticks, whole_ticks

MOST_POINTS = 200
MOST_TITLES = 50
HEIGHT = 190
Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A named line of (x, y) points; `style` is a class of the style sheet."""

    name: str
    points: Sequence[Point]
    style: str
    dots: bool = False
    """Whether to draw the points alone."""
    band: Sequence[tuple[float, float, float]] = ()
    """(x, low, high): what the line is the mean of."""


@dataclass(frozen=True)
class Axes:
    """What the axes are called and how far they reach."""

    x_name: str
    y_name: str
    from_zero: bool = True
    whole_x: bool = True
    """Whether x counts something."""
    top: float | None = None
    """Where to cut off. None: nowhere."""


def binned(points: Sequence[Point]) -> list[Point]:
    """Return at most `most` points, each the mean of its neighbours; points that are no numbers are left out.

    The first and the last keep their x, so that a chart begins and ends where its data do.
    """
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    each = shared(len(finite), MOST_POINTS)
    groups = [finite[i : i + each] for i in range(0, len(finite), each)]
    made = [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]
    if len(made) > 1:
        made[0], made[-1] = (finite[0][0], made[0][1]), (finite[-1][0], made[-1][1])
    return made


def shared(count: int, most: int = MOST_POINTS) -> int:
    """Return how many of `count` points become one."""
    return max(1, -(-count // most))


def line_chart(lines: Sequence[Line], axes: Axes) -> Markup:
    """Return lines over a common x; nothing when no line has two points."""
    drawn = [replace(line, points=binned(line.points)) for line in lines]
    drawn = [line for line in drawn if len(line.points) > 1]
    if not drawn:
        return Markup("")
    xs = [x for line in drawn for x, _ in line.points]
    ys = [y for line in drawn for _, y in line.points]
    for line in drawn:
        ys += [y for _, low, high in line.band for y in (low, high) if math.isfinite(y)]
    plot = _Plot.of(min(xs), max(xs), min(ys), max(ys), axes)
    body = [grid(HEIGHT, plot.up)]
    for line in drawn:
        if len(line.band) > 1:
            body.append(_band(line, plot))
        if line.dots:
            body.append(shape("path", class_=f"dots {line.style}", d=plot.dots(line.points)))
        else:
            body.append(shape("polyline", class_=f"line {line.style}", points=plot.path(line.points)))
    body.append(_titles(drawn, plot, axes))
    return plot.frame("".join(body), f"{axes.y_name} over {axes.x_name}", axes)


def stacked_area(
    steps: Sequence[float],
    parts: Sequence[Sequence[float]],
    names: Sequence[str],
    styles: Sequence[str],
    axes: Axes,
    *,
    peaks: Sequence[float] = (),
) -> Markup:
    """Return `parts`, one series a style, stacked over `steps`. Nothing below two steps.

    Where several steps share a point, a thin line shows the largest of their `peaks`.
    """
    series = [binned(list(zip(steps, values, strict=True))) for values in parts]
    if not series or len(series[0]) < 2:
        return Markup("")
    xs = [x for x, _ in series[0]]
    tops = [[0.0] * len(xs)]
    for values in series:
        tops.append([below + y for below, (_, y) in zip(tops[-1], values, strict=True)])
    plot = _Plot.of(xs[0], xs[-1], 0.0, max(tops[-1]), axes)
    body = []
    for below, above, style in zip(tops, tops[1:], styles, strict=False):
        edge = list(zip(xs, above, strict=True)) + list(zip(xs[::-1], below[::-1], strict=True))
        body.append(shape("polygon", class_=style, points=plot.path(edge)))
    body.append(grid(HEIGHT, plot.up))
    each = shared(len(steps))
    if peaks and each > 1:
        highest = [max(peaks[i : i + each]) for i in range(0, len(peaks), each)]
        body.append(shape("polyline", class_="line peak", points=plot.path(list(zip(xs, highest, strict=True)))))
    for i in range(0, len(xs), max(1, -(-len(xs) // MOST_TITLES))):
        text = ", ".join(f"{name} {values[i][1]:.3g}" for name, values in zip(names, series, strict=True))
        body.append(plot.column(xs[i], MOST_TITLES, f"{axes.x_name} {xs[i]:,.0f}: {text} {axes.y_name}"))
    return plot.frame("".join(body), f"{axes.y_name} over {axes.x_name}: {', '.join(names)}", axes)


@dataclass(frozen=True)
class _Plot:
    x: Scale
    y: Scale
    up: list[Label]
    across: list[Label]

    @classmethod
    def of(cls, first: float, last: float, low: float, high: float, axes: Axes) -> _Plot:
        high = high if axes.top is None else min(high, axes.top)
        low = min(0.0, low) if axes.from_zero else low
        levels = ticks(low, high)
        if levels[-1] < high:  # a line that ends at the border of its chart reads badly
            levels.append(round(levels[-1] + (levels[-1] - levels[-2] if len(levels) > 1 else high), 12))
        y = Scale(min(low, levels[0]), max(high, levels[-1])) if axes.top is None else Scale(low, high)
        if not axes.whole_x and 0.0 <= first <= 0.1 * last:
            first = 0.0
        x = Scale(first, last)
        levels = [level for level in levels if y.low <= level <= y.high]
        places = (whole_ticks if axes.whole_x else ticks)(first, last)
        if axes.whole_x and places[0] > first + 0.12 * (last - first):
            places.insert(0, first)
        up = [Label(1 - y.share(v), text) for v, text in zip(levels, tick_texts(levels), strict=True)]
        across = [Label(x.share(v), text) for v, text in zip(places, tick_texts(places), strict=True)]
        return cls(x, y, up, apart(across))

    def path(self, points: Sequence[Point]) -> str:
        return " ".join(
            f"{number(self.x.share(x) * WIDTH)},{number((1 - self.y.share(y)) * HEIGHT)}" for x, y in points
        )

    def dots(self, points: Sequence[Point]) -> str:
        """Return lines of no length: their round ends are dots that stay round however the drawing stretches."""
        places = (self.path([point]).replace(",", " ") for point in points)
        return "".join(f"M{place}h0" for place in places)

    def column(self, at: float, columns: int, title: str) -> str:
        """Return an invisible stripe that says what is there."""
        width = WIDTH / columns
        left = min(max(0.0, self.x.share(at) * WIDTH - width / 2), WIDTH - width)
        return shape("rect", title, class_="hit", x=number(left), y=0, width=number(width), height=HEIGHT)

    def frame(self, body: str, says: str, axes: Axes) -> Markup:
        return frame(
            body, HEIGHT, says=says, up=self.up, across=self.across, up_name=axes.y_name, across_name=axes.x_name
        )


def _band(line: Line, plot: _Plot) -> str:
    rows = [row for row in line.band if all(map(math.isfinite, row))]
    each = max(1, -(-len(rows) // MOST_POINTS))
    groups = [rows[i : i + each] for i in range(0, len(rows), each)]
    upper = [(sum(r[0] for r in g) / len(g), max(r[2] for r in g)) for g in groups]
    lower = [(sum(r[0] for r in g) / len(g), min(r[1] for r in g)) for g in groups]
    return shape("polygon", class_=f"band {line.style}", points=plot.path(upper + lower[::-1]))


def _titles(lines: Sequence[Line], plot: _Plot, axes: Axes) -> str:
    longest = max(lines, key=lambda line: len(line.points)).points
    found = []
    for i in range(0, len(longest), max(1, -(-len(longest) // MOST_TITLES))):
        at = longest[i][0]
        values = []
        for line in lines:
            near = min(line.points, key=lambda point: abs(point[0] - at))
            values.append(f"{line.name} {near[1]:.4g}")
        where = f"{axes.x_name} {at:,.0f}" if axes.whole_x else f"{at:,.3g} {axes.x_name}"
        found.append(plot.column(at, MOST_TITLES, f"{where}: {', '.join(values)}"))
    return "".join(found)
