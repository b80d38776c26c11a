"""The figures, as formulas: pure functions, units in the names. `docs/check/slow.md` says what each means.

What an exchange takes is in `core.step_model`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def throughput(samples: float, seconds: float) -> float:
    """Return samples per second; NaN when no time passed."""
    return samples / seconds if seconds > 0 else math.nan


def speedup(single_per_second: float, parallel_per_second: float) -> float:
    """Return how many times faster N processes do the work of one: rate_N / rate_1 = T_1 / T_N."""
    return parallel_per_second / single_per_second if single_per_second > 0 else math.nan


def efficiency(speed_up: float, processes: float) -> float:
    """Return speedup / processes: 1 is perfect scaling."""
    return speed_up / processes


def amdahl(parallel_share: float, processes: float) -> float:
    """Return the speedup when `parallel_share` of the work is parallel: 1 / ((1 - P) + P / N).

    Source: Amdahl, AFIPS 1967.

    >>> round(amdahl(0.6, 10), 2), round(amdahl(0.9, 10), 2)
    (2.17, 5.26)
    """
    return 1.0 / ((1.0 - parallel_share) + parallel_share / processes)


def fit_amdahl(processes: Sequence[float], speedups: Sequence[float]) -> float:
    """Return the parallel share P with which Amdahl's law is nearest to measured speedups, from 0 to 1.

    Nearest in 1/speedup, where the law is a line: 1 - 1/S = P (1 - 1/N). NaN without a measurement at N > 1.

    >>> round(fit_amdahl([1, 2, 10], [1, amdahl(0.9, 2), amdahl(0.9, 10)]), 6)
    0.9
    """
    points = [(1 - 1 / n, 1 - 1 / s) for n, s in zip(processes, speedups, strict=True) if n > 1 and s > 0]
    if not points:
        return math.nan
    share = sum(x * y for x, y in points) / sum(x * x for x, _ in points)
    return min(max(share, 0.0), 1.0)


def standard_deviation(values: Sequence[float]) -> float:
    """Return the population standard deviation: sqrt(mean((t_i - mean(t))^2)).

    >>> round(standard_deviation([1, 1, 1, 5]), 2)
    1.73
    """
    if not values:
        return math.nan
    middle = mean(values)
    return math.sqrt(sum((value - middle) ** 2 for value in values) / len(values))


def median(values: Sequence[float]) -> float:
    """Return the middle value; NaN of none."""
    return statistics.median(values) if values else math.nan


def low_median(values: Sequence[float]) -> float:
    """Return the middle value, the lower of two: at least half of the ranks have it, however slow one is."""
    return statistics.median_low(values)


def mean(values: Sequence[float]) -> float:
    """Return the mean; 0 of none."""
    return sum(values) / len(values) if values else 0.0


def split_wait(begin: float, end: float, last_launch: float) -> tuple[float, float]:
    """Divide a rank's wait for an exchange into (waiting for others, communication), in seconds.

    Until the last rank has launched its last bucket (`last_launch`), a rank that waits waits for that
    rank; what remains is the network's time. All three are times of one clock.

    >>> split_wait(10.0, 10.75, 10.5)
    (0.5, 0.25)
    """
    waiting = min(max(last_launch - begin, 0.0), end - begin)
    return waiting, end - begin - waiting


def busy_seconds(spans: Sequence[tuple[float, float]]) -> float:
    """Return how much time the spans cover together.

    >>> busy_seconds([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
