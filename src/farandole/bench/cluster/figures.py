"""From samples to figures: medians, rates and fitted costs, each with its 95 % bootstrap interval. No torch."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ...core.cluster.cluster import Coefficient, CollectiveCost
from ...core.step_model.link import LinkModel, fit_link
from ..measure.intervals import median_interval

_DIGITS = 5
_DRAWS = 200
_LEAST_SECONDS = 1e-15
"""What takes no time by the clock: nothing is divided by 0."""
_FLOOR_SHARE = 1e-3
"""A latency that the fit puts at 0 is given as at most this share of the shortest exchange."""


@dataclass(frozen=True)
class SizedExchange:
    """Exchanges of one size, and what each round took on the slowest rank."""

    sent_bytes: float
    rounds: int
    seconds: tuple[float, ...]


def measured(value: float, low: float, high: float) -> Coefficient:
    """Return a measured figure in five digits; the ends are put in order."""
    low, value, high = sorted((low, value, high))
    return Coefficient(_rounded(value), "measured", _rounded(low), _rounded(high))


def seconds_figure(samples: Sequence[float]) -> Coefficient:
    """Return the median of times."""
    median, (low, high) = median_interval([max(each, _LEAST_SECONDS) for each in samples])
    return measured(median, low, high)


def rate_figure(work: float, samples: Sequence[float]) -> Coefficient:
    """Return `work` (bytes, operations) per second, of samples in seconds."""
    median, (low, high) = median_interval([max(each, _LEAST_SECONDS) for each in samples])
    return measured(work / median, work / high, work / low)


def slowdown_figure(together: Sequence[float], alone: Sequence[float]) -> Coefficient:
    """Return by how much something takes longer; pairs of neighbours in time. Never below 1."""
    median, (low, high) = median_interval(
        [a / max(b, _LEAST_SECONDS) for a, b in zip(together, alone, strict=True)]
    )
    return measured(max(1.0, median), max(1.0, low), max(1.0, high))


def half_width(samples: Sequence[float]) -> float:
    """Return half of the interval of the median, as a share of it."""
    median, (low, high) = median_interval(samples)
    return (high - low) / (2 * median) if median > 0 else 0.0


def fit_cost(sizes: Sequence[SizedExchange]) -> CollectiveCost:
    """Return latency and bytes per second that come nearest to exchanges of several sizes (Hockney's model).

    Least squares of errors over the root of the time. With plain errors the largest messages alone would decide;
    with relative ones the delays of small messages, which are longest on busy machines, would be made up for by
    too much bandwidth. The interval is that of fits to rounds drawn with replacement.
    """
    middle = _fit([(each.sent_bytes, each.rounds, statistics.median(each.seconds)) for each in sizes])
    draw = random.Random(0)
    fits = [
        _fit([
            (each.sent_bytes, each.rounds, statistics.median(draw.choices(each.seconds, k=len(each.seconds))))
            for each in sizes
        ])
        for _ in range(_DRAWS)
    ]  # fmt: skip
    latencies, rates = (sorted(column) for column in zip(*fits, strict=True))
    first, last = int(0.025 * _DRAWS), int(0.975 * _DRAWS) - 1
    return CollectiveCost(
        measured(middle[0], min(middle[0], latencies[first]), max(middle[0], latencies[last])),
        measured(middle[1], min(middle[1], rates[first]), max(middle[1], rates[last])),
    )


def _fit(points: Sequence[tuple[float, int, float]]) -> tuple[float, float]:
    """Return latency and bytes per second, both finite and more than 0."""
    kept = [(sent, rounds, max(seconds, _LEAST_SECONDS)) for sent, rounds, seconds in points]
    roots = [math.sqrt(seconds) for _, _, seconds in kept]
    link = fit_link(
        [sent / root for (sent, _, _), root in zip(kept, roots, strict=True)],
        [rounds / root for (_, rounds, _), root in zip(kept, roots, strict=True)],
        roots,
    )
    sent, _, seconds = kept[-1]
    if link is None:
        link = LinkModel(sent / seconds, 0.0)
    rate = link.bytes_per_second if math.isfinite(link.bytes_per_second) else sent / seconds
    shortest = min(seconds / max(1, rounds) for _, rounds, seconds in kept)
    return max(link.latency_seconds, _FLOOR_SHARE * shortest), rate


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS - 1}e}")
