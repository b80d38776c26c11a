"""How far the largest of many numbers is above their mean: what the slowest of many ranks takes.

Source: David and Nagaraja, "Order Statistics", 2003, sections 4.2 and 4.6.
"""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist

_NORMAL = NormalDist()
_STEP = 0.02
"""Step of the grid on which the largest of N is integrated, in standard deviations."""
_REACH = 9.5


@cache
def largest_normal(ranks: int) -> float:
    """Return the mean of the largest of `ranks` standard normal numbers: 0.5642 of two, 3.24 of 1,024.

    The integral of x N phi(x) Phi(x)^(N - 1), by the trapezoidal rule, which is exact to rounding here.
    """
    count = round(2 * _REACH / _STEP)
    places = [-_REACH + i * _STEP for i in range(count + 1)]
    return _STEP * math.fsum(x * ranks * _NORMAL.pdf(x) * _NORMAL.cdf(x) ** (ranks - 1) for x in places)
