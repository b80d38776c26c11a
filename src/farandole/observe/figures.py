"""The figures, as formulas: pure functions, units in the names. `docs/metrics.md` says what each means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


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


def gustafson(parallel_share: float, processes: float) -> float:
    """Return the speedup when the work grows with the processes: (1 - P) + P x N.

    `parallel_share` is of the time on N processes: when all of them work. Source: Gustafson, CACM 1988.

    >>> gustafson(0.9, 10)
    9.1
    """
    return (1.0 - parallel_share) + parallel_share * processes


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


def communication_seconds(
    sent_bytes: float, bytes_per_second: float, rounds: float = 0.0, latency_seconds: float = 0.0
) -> float:
    """Return what an exchange takes: bytes / bandwidth + rounds x latency.

    `sent_bytes` is what one process sends. A ring of N has 2 (N - 1) rounds: with 100 MB to send at 1250 MB/s and
    0.1 ms, 4 processes take 0.08 s + 6 x 0.0001 s.

    >>> round(communication_seconds(100e6, 1250e6, 2 * (4 - 1), 0.1e-3), 4)
    0.0806
    """
    return sent_bytes / bytes_per_second + rounds * latency_seconds


def ring_bytes(nbytes: float, processes: int) -> float:
    """Return what each process sends when a ring sums `nbytes`: 2 (N - 1) / N times as much.

    No all-reduce can send less from every process. Source: Patarasuk and Yuan, JPDC 2009.

    >>> ring_bytes(100e6, 4)
    150000000.0
    """
    return 2 * (processes - 1) / processes * nbytes


def ring_seconds(nbytes: float, processes: int, bytes_per_second: float, latency_seconds: float = 0.0) -> float:
    """Return what a ring takes to sum `nbytes`: `ring_bytes` in 2 (N - 1) rounds.

    >>> round(ring_seconds(100e6, 4, 1250e6, 0.1e-3), 4)
    0.1206
    """
    sent = ring_bytes(nbytes, processes)
    return communication_seconds(sent, bytes_per_second, 2 * (processes - 1), latency_seconds)


class LinkFit(NamedTuple):
    """A link as exchanges over it show it."""

    bytes_per_second: float
    latency_seconds: float
    """Of one round; 0 where all exchanges were so alike that it cannot be told apart from their bytes."""


def fit_link(sent_bytes: Sequence[float], rounds: Sequence[float], seconds: Sequence[float]) -> LinkFit | None:
    """Return the link whose `communication_seconds` is nearest to what exchanges took, by least squares.

    Neither figure is negative. None without an exchange that sent something and took time.

    >>> fit_link([1e6, 4e6], [2, 2], [0.012, 0.042])
    LinkFit(bytes_per_second=100000000.0, latency_seconds=0.001)
    """
    points = [p for p in zip(sent_bytes, rounds, seconds, strict=True) if p[0] > 0 and p[2] > 0]
    if not points:
        return None
    bb = sum(b * b for b, _, _ in points)
    rr = sum(r * r for _, r, _ in points)
    br = sum(b * r for b, r, _ in points)
    bt = sum(b * t for b, _, t in points)
    rt = sum(r * t for _, r, t in points)
    determinant = bb * rr - br * br
    if determinant > 1e-6 * bb * rr:
        byte_seconds = (bt * rr - rt * br) / determinant
        latency = (rt * bb - bt * br) / determinant
        if byte_seconds > 0 and latency >= 0:
            return LinkFit(float(f"{1 / byte_seconds:.12g}"), float(f"{latency:.12g}"))
    return LinkFit(float(f"{bb / bt:.12g}"), 0.0)


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
