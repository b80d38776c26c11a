"""A predicted scaling as text and as plain values."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from ...core.vocabulary.units import format_bytes, format_rate, format_seconds, format_share
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
            lines += ["", words, *_table([_HEAD, *map(_row, points)])]
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


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


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
