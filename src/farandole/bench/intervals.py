"""Medians and their bootstrap intervals, of times and of ratios that are paired in time."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

_DRAWS = 2000
Interval = tuple[float, float]


def median_interval(values: Sequence[float]) -> tuple[float, Interval]:
    """Return the median and its 95 % bootstrap interval, the same on every call. Needs at least one value."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(_DRAWS))
    return statistics.median(values), (medians[int(_DRAWS * 0.025)], medians[int(_DRAWS * 0.975) - 1])


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, Interval]:
    """Return the median of ours / theirs, pair by pair, and its interval.

    Neighbours in time share the machine's mood, so their ratio is steadier than the ratio of medians.
    """
    return median_interval([a / b for a, b in zip(ours, theirs, strict=True)])
