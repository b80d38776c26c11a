"""A bar divided into parts: one of a table's cells, or a row of them."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from .frame import WIDTH, number, shape

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
