"""A simulated schedule as a grid of characters and as an SVG: one row a rank, time from left to right."""

from __future__ import annotations

from html import escape

from .actions import BACKWARD, BACKWARD_INPUT, FORWARD, KINDS
from .simulate import ActionSpan, Simulation

_COLORS = {FORWARD: "#4c78a8", BACKWARD: "#f58518", BACKWARD_INPUT: "#e8a33d", "W": "#72b7b2"}
_WIDTH, _ROW, _LEFT, _HEAD = 960.0, 26, 64, 34
_MOST_COLUMNS = 400
_LETTERS = 6.5
"""Pixels of a letter of the labels."""


def draw_grid(simulation: Simulation, *, unit_seconds: float) -> str:
    """Return one line a rank: a cell of four characters for `unit_seconds`, dots for the bubble.

    ``F3`` is the forward pass of micro-batch 3, ``B3`` its backward pass, ``I3`` and ``W3`` the parts of a divided
    one; a prime marks further stages of the rank. A step of more than 400 cells is cut, and the line says so.
    """
    columns = round(simulation.total_seconds / unit_seconds)
    lines = []
    for rank in range(len(simulation.busy_seconds)):
        cells = ["."] * columns
        mine = [span for span in simulation.spans if span.rank == rank]
        first = min((span.action.stage for span in mine), default=0)
        for span in mine:
            begin, end = (round(at / unit_seconds) for at in (span.begin_seconds, span.end_seconds))
            prime = "'" if span.action.stage != first else ""
            cells[begin:end] = [f"{span.action.kind}{span.action.micro_batch}{prime}", *["-"] * (end - begin - 1)]
        row = "".join(f"{cell:<4}" for cell in cells[:_MOST_COLUMNS]).rstrip()
        lines.append(f"rank {rank:<3} {row}{' ...' if columns > _MOST_COLUMNS else ''}")
    return "\n".join(lines) + "\n"


def draw_svg(simulation: Simulation, *, title: str) -> str:
    """Return the schedule as an SVG document, with a tooltip for each action."""
    ranks = len(simulation.busy_seconds)
    scale = (_WIDTH - _LEFT - 8) / (simulation.total_seconds or 1.0)
    height = _HEAD + ranks * _ROW + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {height}" font-family="sans-serif" '
        f'font-size="11"><title>{escape(title)}</title>',
        f'<rect width="{_WIDTH:g}" height="{height}" fill="white"/>',
        f'<text x="8" y="20" font-size="13">{escape(title)}</text>',
    ]
    for rank in range(ranks):
        top = _HEAD + rank * _ROW
        parts.append(f'<text x="8" y="{top + 16}">rank {rank}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{top}" width="{simulation.total_seconds * scale:.2f}" height="{_ROW - 4}" '
            'fill="#eeeeee"/>'
        )
    first = {rank: min(s.action.stage for s in simulation.spans if s.rank == rank) for rank in range(ranks)}
    parts += [_box(span, scale, is_first=span.action.stage == first[span.rank]) for span in simulation.spans]
    at = float(_LEFT)
    for kind, name in KINDS.items():
        if any(span.action.kind == kind for span in simulation.spans):
            parts.append(f'<rect x="{at}" y="{height - 20}" width="12" height="12" fill="{_COLORS[kind]}"/>')
            parts.append(f'<text x="{at + 16}" y="{height - 10}">{name}</text>')
            at += 36 + _LETTERS * len(name)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _box(span: ActionSpan, scale: float, *, is_first: bool) -> str:
    action = span.action
    left, width = _LEFT + span.begin_seconds * scale, (span.end_seconds - span.begin_seconds) * scale
    top = _HEAD + span.rank * _ROW
    label = str(action.micro_batch)
    text = (
        f'<text x="{left + width / 2:.2f}" y="{top + 15}" text-anchor="middle" fill="white">{label}</text>'
        if width > _LETTERS * len(label)
        else ""
    )
    what = f"{KINDS[action.kind]} of micro-batch {action.micro_batch}, stage {action.stage}"
    return (
        f'<g><title>{what}</title><rect x="{left:.2f}" y="{top}" width="{max(width - 0.5, 0.1):.2f}" '
        f'height="{_ROW - 4}" fill="{_COLORS[action.kind]}" opacity="{1 if is_first else 0.7}"/>'
        f"{text}</g>"
    )
