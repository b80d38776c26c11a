"""The figures, as formulas: pure functions, units in the names. `docs/metrics.md` says what each means."""

from __future__ import annotations

import math
from collections.abc import Sequence


def throughput(samples: float, seconds: float) -> float:
    """Return samples per second; NaN when no time passed."""
    return samples / seconds if seconds > 0 else math.nan


def speedup(single_per_second: float, parallel_per_second: float) -> float:
    """Return how many times faster N processes do the work of one: rate_N / rate_1 = T_1 / T_N."""
    return parallel_per_second / single_per_second if single_per_second > 0 else math.nan


def efficiency(speed_up: float, processes: int) -> float:
    """Return speedup / processes: 1 is perfect scaling."""
    return speed_up / processes


def amdahl(parallel_share: float, processes: float) -> float:
    """Return the speedup when `parallel_share` of the work is parallel: 1 / ((1 - P) + P / N).

    Source: Amdahl, AFIPS 1967.

    >>> round(amdahl(0.6, 10), 2), round(amdahl(0.9, 10), 2)
    (2.17, 5.26)
    """
    return 1.0 / ((1.0 - parallel_share) + parallel_share / processes)


def standard_deviation(values: Sequence[float]) -> float:
    """Return the population standard deviation: sqrt(mean((t_i - mean(t))^2)).

    >>> round(standard_deviation([1, 1, 1, 5]), 2)
    1.73
    """
    if not values:
        return math.nan
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))


def median(values: Sequence[float]) -> float:
    """Return the middle value; NaN of none."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def split_wait(begin: float, end: float, last_launch: float) -> tuple[float, float]:
    """Divide a rank's wait for an exchange into (waiting for others, communication), in seconds.

    Until the last rank has launched its last bucket (`last_launch`), a rank that waits waits for that
    rank; what remains is the network's time. All three are times of one clock.

    >>> split_wait(10.0, 10.75, 10.5)
    (0.5, 0.25)
    """
    waiting = min(max(last_launch - begin, 0.0), end - begin)
    return waiting, end - begin - waiting
