"""What all charts have: the SVG element, the labels around it, a legend.

[Note: labels are HTML] The drawing stretches to the width there is (`preserveAspectRatio="none"`, strokes that do
not scale), the labels around it do not: a chart is as readable on a phone as on a wall.
Places of labels are per cent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise

from markupsafe import Markup

WIDTH = 1000
"""Width of every drawing, in its own units; the height is in pixels."""
CHARACTER = 0.62
"""Width of a digit or letter of a label, over its size. Used to keep labels apart."""
NARROW_PIXELS = 270
"""Width of a drawing on the narrowest screen we care about (360 pixels)."""
LABEL_PIXELS = 12


@dataclass(frozen=True)
class Label:
    """A text beside an axis."""

    share: float
    """Where: 0 is left or top."""
    text: str


def shape(name: str, title: str = "", **attributes: object) -> str:
    """Return an SVG element; `title` is what a pointer that rests on it shows, without any script.

    >>> shape("rect", "a < b", x=1, fill_opacity=0.5)
    '<rect x="1" fill-opacity="0.5"><title>a &lt; b</title></rect>'
    """
    text = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(str(v))}"' for key, v in attributes.items())
    return f"<{name}{text}><title>{escape(title)}</title></{name}>" if title else f"<{name}{text}/>"


def number(value: float) -> str:
    """Write a coordinate, short."""
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text


def apart(labels: Sequence[Label]) -> list[Label]:
    """Return as many of the labels along a line as do not overlap, the first and every so many."""
    for every in range(1, len(labels) + 1):
        kept = list(labels[::every])
        if all(not overlap(a, b, NARROW_PIXELS) for a, b in pairwise(kept)):
            return kept
    return list(labels[:1])


def overlap(one: Label, other: Label, pixels: float) -> bool:
    """Return whether two labels centred at their places touch on a line of so many pixels."""
    need = (len(one.text) + len(other.text)) / 2 * CHARACTER * LABEL_PIXELS + 8
    return abs(other.share - one.share) * pixels < need


def frame(
    drawing: str,
    height: int,
    *,
    says: str,
    up: Sequence[Label] = (),
    across: Sequence[Label] = (),
    up_name: str = "",
    across_name: str = "",
    style: str = "",
) -> Markup:
    """Return a drawing of `WIDTH` x `height` with its labels. `says` is the text for screen readers."""
    gutter = max((len(label.text) for label in up), default=0)
    rows = "".join(f'<span style="top:{label.share:.2%}">{escape(label.text)}</span>' for label in up)
    columns = "".join(_across(label) for label in across)
    parts = [f'<div class="frame {style}" style="--gutter:{min(gutter, 14)}ch;--height:{height}px">']
    if up_name:
        parts.append(f'<div class="up-name">{escape(up_name)}</div>')
    parts.append(f'<div class="up" aria-hidden="true">{rows}</div>')
    parts.append(
        f'<svg viewBox="0 0 {WIDTH} {height}" preserveAspectRatio="none" role="img" aria-label="{escape(says)}">'
        f"{drawing}</svg>"
    )
    if columns:
        parts.append(f'<div class="across" aria-hidden="true">{columns}</div>')
    if across_name:
        parts.append(f'<div class="across-name">{escape(across_name)}</div>')
    return Markup("".join(parts) + "</div>")


def _across(label: Label) -> str:
    side = " first" if label.share < 0.03 else " last" if label.share > 0.97 else ""
    return f'<span class="at{side}" style="left:{label.share:.2%}">{escape(label.text)}</span>'


def grid(height: int, up: Sequence[Label]) -> str:
    """Return the horizontal lines of a chart."""
    return "".join(f'<path class="grid" d="M0 {number(label.share * height)}H{WIDTH}"/>' for label in up)


# A bar divided into parts: one of a table's cells, or a row of them.

HEIGHT = 16


def share_bar(parts: Sequence[float], titles: Sequence[str], styles: Sequence[str], *, whole: float) -> Markup:
    """Return a bar whose parts are `parts` of `whole`; the rest stays empty."""
    at, body = 0.0, []
    scale = WIDTH / whole if whole > 0 else 0.0
    for part, title, style in zip(parts, titles, styles, strict=True):
        width = min(max(part, 0.0) * scale, WIDTH - at)
        if width >= 0.5:
            body.append(shape("rect", title, class_=style, x=number(at), y=0, width=number(width), height=HEIGHT))
            at += width
    return Markup(
        f'<svg class="bar" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{{}}">'
    ).format(", ".join(titles)) + Markup("".join(body) + "</svg>")


# Axes: positions of values, round tick values, and their labels.


TICKS = 4
"""About how many there are on an axis."""


@dataclass(frozen=True)
class Scale:
    """The range of one axis."""

    low: float
    high: float

    def share(self, value: float) -> float:
        """Return where `value` lies: 0 at the low end, 1 at the high end, clipped; the middle if empty."""
        span = self.high - self.low
        if not span > 0:
            return 0.5
        return min(1.0, max(0.0, (value - self.low) / span))


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers within [low, high], about `TICKS` of them.

    >>> ticks(0, 10)
    [0.0, 2.5, 5.0, 7.5, 10.0]
    """
    if not high > low:
        high = low + (abs(low) or 1.0)
    return _multiples(low, high, (high - low) / TICKS, (1, 2, 2.5, 5, 10))


def whole_ticks(low: float, high: float) -> list[float]:
    """Return round whole numbers within [low, high]: for counts, which have no halves.

    >>> whole_ticks(1, 3)
    [1.0, 2.0, 3.0]
    """
    return _multiples(low, high, max(1.0, (high - low) / TICKS), (1, 2, 5, 10))


def _multiples(low: float, high: float, rough: float, factors: Sequence[float]) -> list[float]:
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * scale for factor in factors if factor * scale >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    found = [round(n * step, 12) for n in range(first, min(last, first + 20) + 1)]
    return found or [low]


def tick_texts(values: Sequence[float]) -> list[str]:
    """Write the numbers of one axis alike: as many decimals as their distance needs, thousands apart.

    >>> tick_texts([0.0, 2.5, 5.0]), tick_texts([0, 1000]), tick_texts([0, 2e6])
    (['0', '2.5', '5.0'], ['0', '1,000'], ['0', '2M'])
    """
    top = max((abs(value) for value in values), default=0.0)
    gaps = [abs(b - a) for a, b in pairwise(values) if b != a]
    if not math.isfinite(top) or top == 0.0:
        return [f"{value:g}" for value in values]
    for suffix, unit in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if top >= (1e5 if unit == 1e3 else unit):
            return [f"{value / unit:.4g}{suffix}" if value else "0" for value in values]
    gap = min(gaps, default=top)
    decimals = _decimals(gap)
    if decimals > 4:
        return [f"{value:.3g}" for value in values]
    return [f"{value:,.{decimals}f}" if value else "0" for value in values]


def _decimals(gap: float) -> int:
    for decimals in range(9):
        if math.isclose(gap, round(gap, decimals), rel_tol=1e-6):
            return decimals
    return 9


def limit(values: Sequence[float]) -> float:
    """Return how high a chart should reach: the largest value, or 4 times the median where few are far above.

    A caller that cuts off values must list them.
    """
    finite = sorted(value for value in values if math.isfinite(value))
    if not finite:
        return 1.0
    middle = finite[len(finite) // 2]
    top = 4.0 * middle
    beyond = sum(value > top for value in finite)
    return top if middle > 0 and 0 < beyond <= max(1, len(finite) // 10) else (finite[-1] or 1.0)


# Charts over steps or time: lines, a band with its mean, and parts stacked on each other.


MOST_POINTS = 200
MOST_TITLES = 50
CHART_HEIGHT = 190
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
    body = [grid(CHART_HEIGHT, plot.up)]
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
    body.append(grid(CHART_HEIGHT, plot.up))
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
            f"{number(self.x.share(x) * WIDTH)},{number((1 - self.y.share(y)) * CHART_HEIGHT)}" for x, y in points
        )

    def dots(self, points: Sequence[Point]) -> str:
        """Return lines of no length: their round ends are dots that stay round however the drawing stretches."""
        places = (self.path([point]).replace(",", " ") for point in points)
        return "".join(f"M{place}h0" for place in places)

    def column(self, at: float, columns: int, title: str) -> str:
        """Return an invisible stripe that says what is there."""
        width = WIDTH / columns
        left = min(max(0.0, self.x.share(at) * WIDTH - width / 2), WIDTH - width)
        return shape("rect", title, class_="hit", x=number(left), y=0, width=number(width), height=CHART_HEIGHT)

    def frame(self, body: str, says: str, axes: Axes) -> Markup:
        return frame(
            body,
            CHART_HEIGHT,
            says=says,
            up=self.up,
            across=self.across,
            up_name=axes.y_name,
            across_name=axes.x_name,
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
