"""Medians and their bootstrap intervals, of times and of ratios that are paired in time."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

import numpy as np

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


def nested_interval(groups: Sequence[Sequence[float]], *, draws: int = 500) -> tuple[float, Interval]:
    """Return the median of the groups' medians and its 95 % bootstrap interval, of values measured in several rounds.

    Rounds are drawn first, then values inside each: values of one round share the machine's mood, and count for less
    than as many independent ones. Needs at least one group, and a value in each.
    """
    medians = nested_medians(groups, draws=draws)
    middle = statistics.median(statistics.median(group) for group in groups)
    return middle, (medians[int(draws * 0.025)], medians[int(draws * 0.975) - 1])


def nested_medians(groups: Sequence[Sequence[float]], *, draws: int = 500) -> list[float]:
    """Return the medians that `nested_interval` draws, in order."""
    draw = np.random.default_rng(0)
    arrays = [np.asarray(group, dtype=float) for group in groups]
    found = []
    for _ in range(draws):
        chosen = [arrays[i] for i in draw.integers(0, len(arrays), len(arrays))]
        found.append(float(np.median([np.median(draw.choice(group, len(group))) for group in chosen])))
    return sorted(found)


def nested_ratio(
    ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], *, draws: int = 500
) -> tuple[float, Interval]:
    """Return ours / theirs of the nested medians, round by round, and its interval. Both have the same rounds."""
    draw = np.random.default_rng(0)
    pairs = [
        (np.asarray(a, dtype=float), np.asarray(b, dtype=float)) for a, b in zip(ours, theirs, strict=True)
    ]
    ratios = []
    for _ in range(draws):
        chosen = [pairs[i] for i in draw.integers(0, len(pairs), len(pairs))]
        ratios.append(
            float(np.median([np.median(draw.choice(a, len(a))) / np.median(draw.choice(b, len(b))) for a, b in chosen]))
        )
    ratios.sort()
    middle = statistics.median(float(np.median(a) / np.median(b)) for a, b in pairs)
    return middle, (ratios[int(draws * 0.025)], ratios[int(draws * 0.975) - 1])
