"""Medians and their bootstrap intervals, of times and of ratios that are paired in time."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

_DRAWS = 2000
_NESTED_DRAWS = 500
_MOST_VALUES = 400
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


def nested_interval(groups: Sequence[Sequence[float]]) -> tuple[float, Interval]:
    """Return the middle of the groups' medians and its 95 % bootstrap interval, of positive values.

    Groups are rounds. They are drawn first, then values inside each: values of one round share the machine's mood,
    and count for less than as many independent ones. Needs at least one group, and a value in each.
    """
    ones = [[1.0] for _ in groups]
    return nested_ratio(groups, ones)


def nested_ratio(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> tuple[float, Interval]:
    """Return the middle over the rounds of median(ours) / median(theirs), and its interval as above.

    Both have the same rounds, whose members were measured side by side. The middle of an even number of rounds is
    the geometric mean of the two in it: then a rate is what was done divided by the time it took, and a speedup by
    rates that by times, however far two rounds are apart.
    """
    draw = random.Random(0)
    rounds = [(_thinned(a), _thinned(b)) for a, b in zip(ours, theirs, strict=True)]
    ratios = sorted(
        _middle([_drawn(draw, a) / _drawn(draw, b) for a, b in draw.choices(rounds, k=len(rounds))])
        for _ in range(_NESTED_DRAWS)
    )
    middle = _middle([statistics.median(a) / statistics.median(b) for a, b in rounds])
    return middle, (ratios[int(_NESTED_DRAWS * 0.025)], ratios[int(_NESTED_DRAWS * 0.975) - 1])


def _middle(values: Sequence[float]) -> float:
    return math.sqrt(statistics.median_low(values) * statistics.median_high(values))


def _drawn(draw: random.Random, values: Sequence[float]) -> float:
    return statistics.median(draw.choices(values, k=len(values)))


def _thinned(values: Sequence[float]) -> Sequence[float]:
    """Return evenly spaced values of very long rounds: the interval is no worse, and does not take minutes."""
    return values[:: -(-len(values) // _MOST_VALUES)]
