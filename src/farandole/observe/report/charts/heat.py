"""A heat map: one value a row and column, the darker the larger."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from markupsafe import Markup

from .frame import WIDTH, Label, apart, frame, number, shape

ROW = 22
MOST_ROWS = 32
MOST_COLUMNS = 64


def heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
    *,
    says: str,
    across_name: str,
    text: Callable[[float], str],
    top: float,
) -> Markup:
    """Return a map of values from 0 (pale) to `top` (full); None is left blank. `text` writes a value."""
    width, body = WIDTH / max(1, len(columns)), []
    for r, own in enumerate(values):
        for c, value in enumerate(own):
            if value is None:
                continue
            strength = min(1.0, max(0.0, value / top)) if top > 0 else 0.0
            body.append(
                shape(
                    "rect", f"{rows[r]}, {across_name} {columns[c]}: {text(value)}", class_="heat",
                    x=number(c * width), y=r * ROW, width=number(width), height=ROW,
                    fill_opacity=f"{0.06 + 0.94 * strength:.2f}",
                )
            )  # fmt: skip
    up = [Label((r + 0.5) / len(rows), name) for r, name in enumerate(rows)]
    across = apart([Label((c + 0.5) / len(columns), name) for c, name in enumerate(columns)])
    return frame(
        "".join(body), ROW * len(rows), says=says, up=up, across=across, across_name=across_name, style="cells"
    )


def warm(text: str, value: float, top: float) -> Markup:
    """Return a number of a table on a ground the warmer the larger it is, up to `top`."""
    strength = min(1.0, max(0.0, value / top)) if top > 0 else 0.0
    if strength < 0.01:
        return Markup('<span class="warm none">{}</span>').format(text)
    return Markup('<span class="warm" style="--strength:{:.2f}">{}</span>').format(strength, text)
