"""Axes: positions of values, round tick values, and their labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

TICKS = 4
"""About how many there are on an axis."""


@dataclass(frozen=True)
class Scale:
    """The range of one axis."""

    low: float
    high: float

    def share(self, value: float) -> float:
        """Return where `value` lies: 0 at the low end, 1 at the high end, clipped; the middle if empty."""
        span = self.high - self.low
        if not span > 0:
            return 0.5
        return min(1.0, max(0.0, (value - self.low) / span))


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers within [low, high], about `TICKS` of them.

    >>> ticks(0, 10)
    [0.0, 2.5, 5.0, 7.5, 10.0]
    """
    if not high > low:
        high = low + (abs(low) or 1.0)
    return _multiples(low, high, (high - low) / TICKS, (1, 2, 2.5, 5, 10))


def whole_ticks(low: float, high: float) -> list[float]:
    """Return round whole numbers within [low, high]: for counts, which have no halves.

    >>> whole_ticks(1, 3)
    [1.0, 2.0, 3.0]
    """
    return _multiples(low, high, max(1.0, (high - low) / TICKS), (1, 2, 5, 10))


def _multiples(low: float, high: float, rough: float, factors: Sequence[float]) -> list[float]:
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * scale for factor in factors if factor * scale >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    found = [round(n * step, 12) for n in range(first, min(last, first + 20) + 1)]
    return found or [low]


def tick_texts(values: Sequence[float]) -> list[str]:
    """Write the numbers of one axis alike: as many decimals as their distance needs, thousands apart.

    >>> tick_texts([0.0, 2.5, 5.0]), tick_texts([0, 1000]), tick_texts([0, 2e6])
    (['0', '2.5', '5.0'], ['0', '1,000'], ['0', '2M'])
    """
    top = max((abs(value) for value in values), default=0.0)
    gaps = [abs(b - a) for a, b in pairwise(values) if b != a]
    if not math.isfinite(top) or top == 0.0:
        return [f"{value:g}" for value in values]
    for suffix, unit in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if top >= (1e5 if unit == 1e3 else unit):
            return [f"{value / unit:.4g}{suffix}" if value else "0" for value in values]
    gap = min(gaps, default=top)
    decimals = _decimals(gap)
    if decimals > 4:
        return [f"{value:.3g}" for value in values]
    return [f"{value:,.{decimals}f}" if value else "0" for value in values]


def _decimals(gap: float) -> int:
    for decimals in range(9):
        if math.isclose(gap, round(gap, decimals), rel_tol=1e-6):
            return decimals
    return 9


def limit(values: Sequence[float]) -> float:
    """Return how high a chart should reach: the largest value, or 4 times the median where few are far above.

    A caller that cuts off values must list them.
    """
    finite = sorted(value for value in values if math.isfinite(value))
    if not finite:
        return 1.0
    middle = finite[len(finite) // 2]
    top = 4.0 * middle
    beyond = sum(value > top for value in finite)
    return top if middle > 0 and 0 < beyond <= max(1, len(finite) // 10) else (finite[-1] or 1.0)
