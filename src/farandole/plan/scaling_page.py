"""A predicted scaling as text and as plain values."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from markupsafe import Markup

from ..core.vocabulary.text import in_columns
from ..core.vocabulary.units import format_bytes, format_rate, format_seconds, format_share
from .answer_page import HEIGHT, WIDTH, Axis, bar, dot, fill, frame
from .scaling import ScaleAnswer, ScalePoint

_COLUMNS = 100
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
    return textwrap.wrap(text, _COLUMNS, subsequent_indent=indent)


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


_TABLE = (
    "ranks", "mesh", "batch", "step", "samples/s", "efficiency", "communication", "goodput", "fails every",
    "save every",
)  # fmt: skip
_MOST_LABELS = 8


def to_html(answer: ScaleAnswer) -> str:
    """Return the page: one file without references to anything outside of it."""
    modes = []
    for mode, words in (("weak", "Weak scaling"), ("strong", "Strong scaling")):
        points = [point for point in answer.points if point.mode == mode]
        if points:
            modes.append((words, _throughput(points), _steps(points), [_cells(point) for point in points]))
    return fill(
        "scaling.html.j2",
        model=answer.model, cluster=answer.cluster, grows=answer.grows, assumptions=answer.assumptions,
        modes=modes, parts=list(parts_of(answer.points[0])), head=_TABLE,
        notes=[*(f"left out: {each.to_text()}" for each in answer.left_out), *answer.warnings],
    )  # fmt: skip


def parts_of(point: ScalePoint) -> Mapping[str, float]:
    """Return the seconds of a step by what they are spent on; together the step."""
    terms = point.prediction.terms
    bubble, slow, data = (terms.get(name, 0.0) for name in ("bubble", "straggler", "loader"))
    rest = point.seconds - point.communication_seconds - bubble - slow - data
    return {
        "computing": max(0.0, rest), "communication": point.communication_seconds, "bubble": bubble,
        "slow ranks": slow, "waiting for data": data,
    }  # fmt: skip


def _throughput(points: Sequence[ScalePoint]) -> Markup:
    """Return samples a second over ranks: perfect scaling, with failures and without, and a dot a size."""
    perfect = [points[0].samples_per_second * point.ranks / points[0].ranks for point in points]
    plain = [point.samples_per_second for point in points]
    kept = [max(1e-9, point.samples_per_second * point.goodput) for point in points]
    every = [*perfect, *plain, *kept]
    across, up = Axis(points[0].ranks, points[-1].ranks), Axis(min(every), max(every))

    def places(values: Sequence[float]) -> list[tuple[float, float]]:
        return [
            (WIDTH * across.share(point.ranks), HEIGHT * (1 - up.share(value)))
            for point, value in zip(points, values, strict=True)
        ]

    ticks = [(1 - up.share(value), format_rate(value)) for value in up.ticks()]
    drawn = [f'<path class="grid" d="M0 {HEIGHT * share:.1f}H{WIDTH}"/>' for share, _ in ticks]
    for values, style in ((perfect, "ideal"), (kept, "edge c1-line"), (plain, "edge")):
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in places(values))
        drawn.append(f'<path class="{style}" d="M{line}"/>')
    for values, style in ((kept, "dot best"), (plain, "dot front")):
        drawn += [dot(style, place, _says(point)) for place, point in zip(places(values), points, strict=True)]
    shown = [*points[: -1 : max(1, -(-len(points) // _MOST_LABELS))], points[-1]]
    return frame(
        "".join(drawn),
        says="samples a second over ranks",
        up=ticks,
        across=[(across.share(point.ranks), f"{point.ranks:,}") for point in shown],
        names=("samples a second", "ranks"),
    )


def _steps(points: Sequence[ScalePoint]) -> list[tuple[str, Markup, str]]:
    """Return what a step is made of: for each size its name, a bar relative to the longest step, and the time."""
    longest = max(point.seconds for point in points)
    rows = []
    for point in points:
        parts = list(parts_of(point).items())
        said = [f"{format_seconds(value)}, {format_share(value / point.seconds)}" for _, value in parts]
        rows.append((f"{point.ranks:,} ranks", bar(parts, longest, said), format_seconds(point.seconds)))
    return rows


def _cells(point: ScalePoint) -> list[str]:
    return [
        f"{point.ranks:,}", point.degrees, f"{point.global_batch:,}", format_seconds(point.seconds),
        format_rate(point.samples_per_second), f"{point.efficiency:.3f}", format_share(point.communication_share),
        format_share(point.goodput, 1), *map(_every, (point.failure_seconds, point.save_every_seconds)),
    ]  # fmt: skip


def _says(point: ScalePoint) -> str:
    return (
        f"{point.ranks:,} ranks ({point.degrees}), batch {point.global_batch:,}: step "
        f"{format_seconds(point.seconds)}, {format_rate(point.samples_per_second)} samples/s, efficiency "
        f"{point.efficiency:.3f}, goodput {format_share(point.goodput, 1)}"
    )


def _every(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)
