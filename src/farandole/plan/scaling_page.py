"""A predicted scaling as text and as plain values."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from html import escape
from typing import Any

from ..core.vocabulary.text import in_columns
from ..core.vocabulary.units import format_bytes, format_rate, format_seconds, format_share
from ..version import VERSION
from .scaling import ScaleAnswer, ScalePoint

WIDTH = 100
_WORDS = {"weak": "weak scaling: the samples of a rank stay", "strong": "strong scaling: the global batch stays"}
_HEAD = ("ranks", "batch", "step", "samples/s", "efficiency", "communication", "waiting", "goodput", "kept/s")
_LEGEND = (
    "efficiency: samples a second and rank beside the smallest size. communication: share of a step in which no "
    "computing hides it. waiting: share for slow and varying ranks, and for data. goodput: share of the time that "
    "is kept work; kept/s: samples a second with failures."
)


def to_text(answer: ScaleAnswer) -> str:
    """Return the answer for a terminal, at most 100 columns wide."""
    lines = _wrap(
        f"{answer.model} on {answer.cluster}: predicted, nothing ran; {answer.grows} grows with the ranks"
    )
    for text in answer.assumptions:
        lines += _wrap(f"assumed: {text}", "  ")
    for mode, words in _WORDS.items():
        points = [point for point in answer.points if point.mode == mode]
        if points:
            lines += ["", words, *(f"  {line}" for line in in_columns([_HEAD, *map(_row, points)], left=()))]
            lines += _too_large(points)
    lines += ["", *_wrap(_LEGEND)]
    lines += _saves(answer.of(answer.points[0].mode))
    lines += [line for each in answer.left_out for line in _wrap(f"left out: {each.to_text()}", "  ")]
    lines += [line for text in answer.warnings for line in _wrap(f"warning: {text}", "  ")]
    return "\n".join(lines)


def _row(point: ScalePoint) -> tuple[str, ...]:
    return (
        f"{point.ranks:,}",
        f"{point.global_batch:,}",
        format_seconds(point.seconds),
        format_rate(point.samples_per_second),
        f"{point.efficiency:.3f}",
        format_share(point.communication_share),
        format_share(point.waiting_seconds / point.seconds),
        format_share(point.goodput, 1),
        format_rate(point.goodput * point.samples_per_second),
    )


def _saves(points: Sequence[ScalePoint]) -> list[str]:
    found = {each.ranks: format_seconds(each.save_every_seconds) for each in points if each.save_every_seconds}
    if not found:
        return []
    told = ", ".join(f"{text} with {ranks:,} ranks" for ranks, text in found.items())
    return _wrap(f"save every {told if len(set(found.values())) > 1 else next(iter(found.values()))}", "  ")


def _too_large(points: Sequence[ScalePoint]) -> list[str]:
    wrong = [point for point in points if not point.fits]
    if not wrong:
        return []
    ranks = ", ".join(f"{point.ranks:,}" for point in wrong)
    most = format_bytes(max(point.prediction.peak_bytes for point in wrong))
    return _wrap(f"does not fit into the memory of a rank with {ranks} ranks: it needs up to {most}", "  ")


def _wrap(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent)


def to_mapping(answer: ScaleAnswer) -> dict[str, Any]:
    """Return everything as plain values; seconds are those of a step, shares from 0 to 1."""
    points = [
        {
            **{each.name: getattr(point, each.name) for each in fields(point) if each.name != "prediction"},
            "terms": dict(point.prediction.terms),
            "low_seconds": point.prediction.low_seconds,
            "high_seconds": point.prediction.high_seconds,
            "peak_bytes": point.prediction.peak_bytes,
            "seconds": point.seconds,
            "communication_seconds": point.communication_seconds,
            "waiting_seconds": point.waiting_seconds,
            "samples_per_second": point.samples_per_second,
            "communication_share": point.communication_share,
        }
        for point in answer.points
    ]
    return {
        "version": 1,
        "model": answer.model,
        "cluster": answer.cluster,
        "grows": answer.grows,
        "points": points,
        "left_out": [asdict(each) for each in answer.left_out],
        "assumptions": list(answer.assumptions),
        "warnings": list(answer.warnings),
    }


# A predicted scaling as one HTML page: throughput against perfect scaling, and what each step is made of.


_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 640.0, 300.0, 70.0, 36.0, 14.0
_PARTS = (
    ("computing", "#4c78a8"),
    ("communication", "#f58518"),
    ("bubble", "#9aa7b5"),
    ("slow ranks", "#e45756"),
    ("waiting for data", "#72b7b2"),
)
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --paper: #ffffff; --quiet: #667085; --line: #d0d5dd; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ef; --paper: #14181f; --quiet: #98a2b3; --line: #3a4352; }
}
body { margin: 2rem auto; max-width: 70rem; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif;
  color: var(--ink); background: var(--paper); }
h1 { font-size: 1.3rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.charts { display: flex; flex-wrap: wrap; gap: 1.5rem; } figure { margin: 0; flex: 1 1 26rem; }
svg { width: 100%; height: auto; } svg text { fill: var(--quiet); font-size: 11px; }
.axis { stroke: var(--line); } .quiet, figcaption { color: var(--quiet); }
table { border-collapse: collapse; } td, th { padding: .2rem .7rem; text-align: right; }
th { color: var(--quiet); font-weight: 500; } tr + tr td { border-top: 1px solid var(--line); }
.wide { overflow-x: auto; } .entry { white-space: nowrap; }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 .9em; }
"""


def to_html(answer: ScaleAnswer) -> str:
    """Return the page: one file without references to anything outside of it."""
    body = [
        f"<h1>{escape(answer.model)} on {escape(answer.cluster)}: predicted scaling</h1>",
        f"<p>Predicted; nothing ran. The degree that grows with the ranks: {escape(answer.grows)}.</p>",
        *(f"<p>Assumed: {escape(text)}.</p>" for text in answer.assumptions),
    ]
    for mode, words in (("weak", "Weak scaling"), ("strong", "Strong scaling")):
        points = [point for point in answer.points if point.mode == mode]
        if points:
            body += [f"<h2>{words}</h2>", '<div class="charts">', _throughput(points), _steps(points), "</div>"]
            body.append(_drawn_table(points))
    notes = [f"left out: {each.to_text()}" for each in answer.left_out] + list(answer.warnings)
    body += [f'<p class="quiet">{escape(text)}</p>' for text in notes]
    body.append(f'<p class="quiet">farandole {escape(VERSION)}</p>')
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(answer.model)}: predicted scaling</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def parts_of(point: ScalePoint) -> Mapping[str, float]:
    """Return the seconds of a step by what they are spent on; together the step."""
    terms = point.prediction.terms
    bubble, slow, data = (terms.get(name, 0.0) for name in ("bubble", "straggler", "loader"))
    rest = point.seconds - point.communication_seconds - bubble - slow - data
    return {
        "computing": max(0.0, rest), "communication": point.communication_seconds, "bubble": bubble,
        "slow ranks": slow, "waiting for data": data,
    }  # fmt: skip


def _throughput(points: Sequence[ScalePoint]) -> str:
    """Draw samples a second over ranks, both in powers of two, with failures and without."""
    perfect = [points[0].samples_per_second * point.ranks / points[0].ranks for point in points]
    plain = [point.samples_per_second for point in points]
    kept = [point.samples_per_second * point.goodput for point in points]
    xs = [math.log2(point.ranks) for point in points]
    low = math.floor(math.log2(max(1e-9, min(*plain, *kept, *perfect, *kept))))
    high = math.ceil(math.log2(max(1e-9, *perfect, *plain)))
    high = high if high > low else low + 1

    def at(x: float, value: float) -> tuple[float, float]:
        span = xs[-1] - xs[0] or 1.0
        left = _LEFT + (x - xs[0]) / span * (_WIDTH - _LEFT - 20)
        share = (math.log2(max(value, 1e-9)) - low) / (high - low)
        return left, _HEIGHT - _BOTTOM - min(max(share, 0.0), 1.0) * (_HEIGHT - _BOTTOM - _TOP)

    body = []
    for level in range(low, high + 1, max(1, (high - low) // 6)):
        y = at(xs[0], 2.0**level)[1]
        body.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}"/>')
        body.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{format_rate(2.0**level)}</text>')
    shown = max(1, -(-len(points) // 8))
    for number, (x, point) in enumerate(zip(xs, points, strict=True)):
        if number % shown == 0 or number == len(points) - 1:
            place = at(x, 1.0)[0]
            body.append(
                f'<text x="{place:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{point.ranks:,}</text>'
            )
    for values, color, dash in ((perfect, "#9aa7b5", "4 4"), (kept, "#e45756", ""), (plain, "#4c78a8", "")):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*pair) for pair in zip(xs, values, strict=True)))
        body.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2" stroke-dasharray="{dash}"/>'
        )
    for x, point in zip(xs, points, strict=True):
        for value, color in ((point.samples_per_second * point.goodput, "#e45756"), (0.0, "#4c78a8")):
            left, top = at(x, value or point.samples_per_second)
            body.append(
                f'<circle cx="{left:.1f}" cy="{top:.1f}" r="4" fill="{color}">'
                f"<title>{_says(point)}</title></circle>"
            )
    legend = _legend([("perfect", "#9aa7b5"), ("samples/s", "#4c78a8"), ("kept with failures", "#e45756")])
    return _figure("Samples a second over ranks", body, legend)


def _steps(points: Sequence[ScalePoint]) -> str:
    """Draw what a step is made of, one bar a size."""
    longest = max(point.seconds for point in points)
    width = (_WIDTH - _LEFT - 20) / len(points)
    body = []
    for share in (0.0, 0.5, 1.0):
        y = _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)
        text = format_seconds(share * longest) if share else "0"
        body.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}"/>')
        body.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    shown = max(1, -(-len(points) // 8))
    for number, point in enumerate(points):
        left, top = _LEFT + number * width + 0.15 * width, _HEIGHT - _BOTTOM
        for (name, color), seconds in zip(_PARTS, parts_of(point).values(), strict=True):
            height = seconds / longest * (_HEIGHT - _BOTTOM - _TOP)
            if height <= 0:
                continue
            top -= height
            title = (
                f"{point.ranks:,} ranks: {name} {format_seconds(seconds)}, {format_share(seconds / point.seconds)}"
            )
            body.append(
                f'<rect x="{left:.1f}" y="{top:.1f}" width="{0.7 * width:.1f}" height="{height:.1f}" '
                f'fill="{color}"><title>{title}</title></rect>'
            )
        if number % shown == 0 or number == len(points) - 1:
            body.append(
                f'<text x="{left + 0.35 * width:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">'
                f"{point.ranks:,}</text>"
            )
    used = [(name, color) for name, color in _PARTS if any(parts_of(point)[name] > 0 for point in points)]
    return _figure("What a step is made of", body, _legend(used))


def _says(point: ScalePoint) -> str:
    return (
        f"{point.ranks:,} ranks ({point.degrees}), batch {point.global_batch:,}: step "
        f"{format_seconds(point.seconds)}, {format_rate(point.samples_per_second)} samples/s, efficiency "
        f"{point.efficiency:.3f}, goodput {format_share(point.goodput, 1)}"
    )


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    return "".join(
        f'<span class="entry"><span class="key" style="background:{color}"></span>{name}</span> '
        for name, color in entries
    )


def _figure(title: str, body: Sequence[str], legend: str) -> str:
    return (
        f'<figure><figcaption>{title}<br>{legend}</figcaption><svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" '
        f'role="img" aria-label="{title}">{"".join(body)}</svg></figure>'
    )


def _drawn_table(points: Sequence[ScalePoint]) -> str:
    head = (
        "ranks", "mesh", "batch", "step", "samples/s", "efficiency", "communication", "goodput", "fails every",
        "save every",
    )  # fmt: skip
    rows = [
        (
            f"{point.ranks:,}", escape(point.degrees), f"{point.global_batch:,}", format_seconds(point.seconds),
            format_rate(point.samples_per_second), f"{point.efficiency:.3f}",
            format_share(point.communication_share), format_share(point.goodput, 1),
            *map(_every, (point.failure_seconds, point.save_every_seconds)),
        )
        for point in points
    ]  # fmt: skip
    cells = "".join(f"<th>{name}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{cells}</tr>{lines}</table></div>'


def _every(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)
