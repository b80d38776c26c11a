"""What all charts have: the SVG element, the labels around it, a legend.

[Note: labels are HTML] The drawing stretches to the width there is (`preserveAspectRatio="none"`, strokes that do
not scale), the labels around it do not: a chart is as readable on a phone as on a wall.
Places of labels are per cent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
