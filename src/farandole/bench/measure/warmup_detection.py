"""When has a run settled? Pure functions on step times: how many steps are warm-up, and whether the rest drifts.

[Note: the cut] White's marginal standard error rule ("An effective truncation heuristic for bias reduction in
simulation output", 1997): leave out the first d values for which the standard error of the mean of the others is
least. A single late stall would move the cut behind itself, so values are first brought inside the band of the
second half: its median, and twice the 90th percentile of its absolute deviations on either side. A multiple of the
median deviation will not do: where most steps take the same time to a tick, that is next to nothing, and so narrow
a band makes warm-up as tame as any step.

[Note: the drift] What remains is divided into blocks; Mann and Kendall's test on their medians says whether they
rise or fall.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

LEAST_STEPS = 8
"""With fewer nothing can be said about drift, and only the first step is left out."""
BLOCKS = 20
_BAND, _OUTLYING = 2.0, 0.9
_SIGNIFICANT = 2.576
"""A normal variable lies beyond it in one of a hundred cases."""


@dataclass(frozen=True)
class Settled:
    """Where steady running begins."""

    warm_up: int
    """Values to leave out at the begin, at most half."""
    steady: bool
    """Whether the rest neither rises nor falls, as far as it shows."""


def settle(values: Sequence[float]) -> Settled:
    """Return how many of the values are warm-up. See [Note: the cut], [Note: the drift].

    >>> settle([9.0, 5.0, 3.0] + [1.0, 1.1, 0.9, 1.05] * 10)
    Settled(warm_up=3, steady=True)
    """
    if len(values) < LEAST_STEPS:
        return Settled(min(1, max(0, len(values) - 1)), False)
    cut = max(1, _cut(_banded(values)))
    rest = values[cut:]
    return Settled(cut, len(rest) >= LEAST_STEPS and not drifts(rest))


def _banded(values: Sequence[float]) -> list[float]:
    late = values[len(values) // 2 :]
    middle = statistics.median(late)
    deviations = sorted(abs(value - middle) for value in late)
    spread = deviations[int(_OUTLYING * (len(late) - 1))]
    reach = _BAND * max(spread, 0.001 * abs(middle))
    return [min(max(value, middle - reach), middle + reach) for value in values]


def _cut(values: Sequence[float]) -> int:
    """Return the d up to half for which the rest's mean has the least standard error; one pass from behind."""
    best, least = 0, math.inf
    mean, squares = 0.0, 0.0
    for d in range(len(values) - 1, -1, -1):
        count = len(values) - d
        delta = values[d] - mean
        mean += delta / count
        squares += delta * (values[d] - mean)
        if d <= len(values) // 2:
            error = squares / count**2
            if error <= least * (1 + 1e-12):
                best, least = d, min(error, least)
    return best


def drifts(values: Sequence[float]) -> bool:
    """Return whether the values rise or fall, by Mann and Kendall's test on the medians of up to twenty blocks."""
    count = min(BLOCKS, len(values))
    if count < LEAST_STEPS:
        return False
    bounds = [len(values) * i // count for i in range(count + 1)]
    blocks = [statistics.median(values[a:b]) for a, b in pairwise(bounds)]
    rises = sum(
        (later > earlier) - (later < earlier) for i, earlier in enumerate(blocks) for later in blocks[i + 1 :]
    )
    deviation = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    return (abs(rises) - 1) / deviation > _SIGNIFICANT
