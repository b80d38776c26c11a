"""Computing that varies from step to step, and what the slowest of many ranks makes of it.

[Note: the slowest of many] A step lasts as long as its slowest rank, so ranks that vary cost more the more of them
there are: the mean of the largest of N factors. Noise of a rank is one factor a step, independent of the other
ranks and of other steps. With Gaussian tails the largest of N is e_N standard deviations above the mean, with
exponential tails H_N - 1 (David and Nagaraja, "Order Statistics", 2003, sections 4.2 and 4.6); Gaussian tails are
optimistic for machines that pause. Measured times are resampled: their quantiles are those of the sorted times, so
nothing is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final, Literal

from ...core.vocabulary.errors import ConfigError

Tail = Literal["gaussian", "exponential", "measured"]
TAILS: Final[tuple[Tail, ...]] = ("gaussian", "exponential")
MOST_SHARE = 1.0
_NORMAL = NormalDist()
_LEAST_FACTOR = 0.01
"""No rank computes in less than a hundredth of its usual time, whatever is drawn."""


@dataclass(frozen=True)
class Noise:
    """How the computing of a rank varies: factors of its usual time, whose mean is 1."""

    share: float = 0.0
    """Standard deviation, as a share of the mean."""
    tail: Tail = "gaussian"
    measured: tuple[float, ...] = ()
    """With tail "measured": factors, ascending."""

    def __post_init__(self) -> None:
        if not 0 <= self.share <= MOST_SHARE:
            raise ConfigError(
                f"noise {self.share}: expected a share of a step's computing from 0 to {MOST_SHARE:g}"
            )

    @classmethod
    def of_times(cls, seconds: Sequence[float]) -> Noise:
        """Return the noise of measured `seconds` of computing, one a rank and step."""
        if len(seconds) < 2 or min(seconds) <= 0:
            raise ConfigError(f"noise: {len(seconds)} measured times, expected at least 2, all above 0")
        average = math.fsum(seconds) / len(seconds)
        factors = sorted(each / average for each in seconds)
        variance = math.fsum((each - 1) ** 2 for each in factors) / (len(factors) - 1)
        return cls(min(math.sqrt(variance), MOST_SHARE), "measured", tuple(factors))

    @property
    def is_none(self) -> bool:
        """Whether nothing varies."""
        return self.share == 0

    def quantile(self, probability: float) -> float:
        """Return the factor that a rank stays below with `probability`, 0 to 1."""
        if self.is_none:
            return 1.0
        if self.tail == "measured":
            place = math.ceil(probability * len(self.measured)) - 1
            return self.measured[min(max(place, 0), len(self.measured) - 1)]
        inside = min(max(probability, 1e-15), 1 - 1e-15)
        if self.tail == "gaussian":
            return max(_LEAST_FACTOR, 1 + self.share * _NORMAL.inv_cdf(inside))
        return max(_LEAST_FACTOR, 1 - self.share - self.share * math.log1p(-inside))

    def largest_quantile(self, probability: float, ranks: int) -> float:
        """Return the factor that the largest of `ranks` factors stays below with `probability`."""
        return self.quantile(probability ** (1 / ranks))


def largest_of(noise: Noise, groups: Sequence[tuple[int, float]], probability: float) -> float:
    """Return what the largest of several `groups` of ranks stays below with `probability`.

    `groups`: (ranks, factor of their usual time) each: a slow rank is a group of its own.
    """
    if len(groups) == 1:
        ranks, factor = groups[0]
        return factor * noise.largest_quantile(probability, ranks)
    alone = [factor * noise.largest_quantile(probability, ranks) for ranks, factor in groups]
    low, high = (
        max(alone),
        max(factor for _, factor in groups)
        * noise.largest_quantile(probability ** (1 / len(groups)), sum(ranks for ranks, _ in groups)),
    )
    for _ in range(60):
        middle = (low + high) / 2
        if math.prod(_distribution(noise, middle / factor) ** ranks for ranks, factor in groups) < probability:
            low = middle
        else:
            high = middle
    return high


def _distribution(noise: Noise, factor: float) -> float:
    """Return the share of steps in which a rank stays at or below `factor`."""
    if noise.is_none:
        return float(factor >= 1)
    if noise.tail == "measured":
        return sum(each <= factor for each in noise.measured) / len(noise.measured)
    above = (factor - 1) / noise.share
    return _NORMAL.cdf(above) if noise.tail == "gaussian" else max(0.0, -math.expm1(-above - 1))
