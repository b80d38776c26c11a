"""The diagrams of docs/diagrams, as SVG, which ``python -m tests.style`` writes."""

from __future__ import annotations

from html import escape
from pathlib import Path

from farandole.core.schedule import build_schedule
from farandole.core.schedule_simulation import StageTimes, draw_svg, simulate

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "diagrams"
BLUE, ORANGE, GREEN, RED, GREY = "#4c78a8", "#f58518", "#54a24b", "#e45756", "#98a2b3"


def _page(width: int, height: int, title: str, parts: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'font-family="sans-serif" font-size="12" fill="#344054"><title>{escape(title)}</title>'
        f'<rect width="{width}" height="{height}" fill="white"/>'
        '<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{GREY}"/></marker></defs>'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def _box(x: float, y: float, width: float, text: str, color: str, height: float = 26) -> str:
    shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{color}"/>'
    return shape + _text(x + width / 2, y + height / 2 + 4, text, 'text-anchor="middle" fill="white"')


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" {more}>{escape(text)}</text>'


def _arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="{GREY}" fill="none" marker-end="url(#end)"/>'


def gradient() -> str:
    """Return a step of a rank over time: buckets leave while backward still computes."""
    parts = [
        _text(12, 30, "computing"),
        _box(110, 14, 120, "forward", GREY),
        *(_box(232 + 92 * index, 14, 90, f"backward {layer}", BLUE) for index, layer in enumerate((4, 3, 2, 1))),
        _box(656, 14, 60, "step", GREEN),
        _text(12, 74, "encoding"),
        _text(12, 114, "on the wire"),
    ]
    for index, (name, begin) in enumerate((("bucket 1: 4, 3", 416), ("bucket 2: 2", 508), ("bucket 3: 1", 600))):
        parts += [
            _arrow(begin, 42, begin, 56),
            _box(begin, 58, 22, "", ORANGE),
            _arrow(begin + 22, 84, begin + 22, 96),
            _box(begin + 22, 98, (86, 84, 34)[index], name if index < 2 else "3", RED),
        ]
    parts += [
        _text(12, 152, "Numbers are layers. A bucket is encoded and sent when its last gradient is there."),
        _text(12, 168, "What lies under blue is hidden: the step waits only for the last bucket."),
    ]
    return _page(730, 180, "A step of one rank over time", parts)


def mesh() -> str:
    """Return eight ranks as data x pipeline x tensor."""
    parts = []
    for data in range(2):
        for stage in range(2):
            for tensor in range(2):
                rank = 4 * stage + 2 * data + tensor  # tensor innermost, pipeline outermost
                x, y = 110 + 300 * data + 130 * stage, 40 + 56 * tensor
                parts.append(_box(x, y, 100, f"rank {rank}", (BLUE, ORANGE)[stage], 34))
        x = 110 + 300 * data
        parts.append(_text(x, 26, f"replica {data} of data = 2", 'font-weight="600"'))
        parts += [_arrow(x + 100, 57 + 56 * tensor, x + 129, 57 + 56 * tensor) for tensor in range(2)]
        for stage in range(2):
            at = x + 50 + 130 * stage
            parts.append(f'<path d="M{at} 74V96" stroke="{GREEN}" stroke-width="3"/>')
    parts += [
        f'<path d="M160 132V146H460V132" stroke="{RED}" stroke-width="2" fill="none"/>',
        f'<path d="M290 132V154H590V132" stroke="{RED}" stroke-width="2" fill="none"/>',
        _text(12, 178, "green: tensor = 2, a layer over two ranks, at every layer: the fastest links"),
        _text(12, 194, "arrows: pipeline = 2, activations of micro-batches go to the next stage"),
        _text(12, 210, "red: data = 2, gradients once a step, between ranks with the same part of the model"),
    ]
    return _page(730, 222, "Eight ranks as a mesh: data = 2, pipeline = 2, tensor = 2", parts)


def meetings() -> str:
    """Return ranks that meet every step, every fourth one, and in parts with overlap."""
    parts = []
    y = 16.0
    for name, every in (("every step", 1), ("local:H=4", 4)):
        x, step = 120.0, 0
        parts.append(_text(12, y + 18, name))
        while x + 58 <= 690:
            parts.append(_box(x, y, 56, f"{step + 1}", BLUE))
            x, step = x + 58, step + 1
            if step % every == 0:
                parts.append(_box(x, y, 38, "meet", ORANGE))
                x += 40
        y += 40
    parts.append(_text(12, y + 18, "H=4,fragments=2,"))
    parts.append(_text(12, y + 34, "overlap=1"))
    parts += [_box(120 + 58 * step, y, 56, str(step + 1), BLUE) for step in range(9)]
    for index, step in enumerate((2, 4, 6, 8)):
        parts.append(_box(120 + 58 * step, y + 30, 56, f"part {index % 2 + 1}", ORANGE, 20))
    parts += [
        _text(
            12, y + 78, "Blue: computing. Orange: exchange of gradients, or every H steps of how far ranks came."
        ),
        _text(
            12, y + 94, "With overlap a part travels while the next step computes; its mean comes a step later."
        ),
    ]
    return _page(730, int(y) + 106, "When ranks meet", parts)


def schedule(name: str) -> str:
    """Return four stages and eight micro-batches by a schedule."""
    times = [StageTimes(1.0, 1.0, 1.0)] * 4
    return draw_svg(simulate(build_schedule(name, 4, 8), times), title=f"{name}: 4 ranks, 8 micro-batches")


DIAGRAMS = {
    "gradient": gradient,
    "mesh": mesh,
    "meetings": meetings,
    "1f1b": lambda: schedule("1f1b"),
    "zb-h1": lambda: schedule("zb-h1"),
}


def write_diagrams() -> None:
    """Write them all."""
    for name, draw in DIAGRAMS.items():
        FOLDER.joinpath(f"{name}.svg").write_text(draw(), encoding="utf-8")
