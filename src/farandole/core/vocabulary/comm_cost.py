"""What an exchange takes, as formulas: pure functions, units in the names.

The tuner predicts by them, buckets count by them, and reports compare with them: there is no second copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


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


def ring_factor(processes: int, passes: int = 2) -> float:
    """Return what each process of a ring sends, as a multiple of the data: 2 (N - 1) / N for a sum.

    `passes`: 2 for an all-reduce, 1 for a reduce-scatter or an all-gather. No all-reduce can send less from every
    process. Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 2009.

    >>> ring_factor(4), ring_factor(4, passes=1)
    (1.5, 0.75)
    """
    return passes * (processes - 1) / processes


def ring_bytes(nbytes: float, processes: int, passes: int = 2) -> float:
    """Return what each process sends when a ring sums `nbytes`: `ring_factor` times as much.

    >>> ring_bytes(100e6, 4)
    150000000.0
    """
    return ring_factor(processes, passes) * nbytes


def ring_sent_bytes(byte_count: int, processes: int, passes: int = 2) -> int:
    """Return `ring_bytes` in whole bytes, as records and counters have them; exact for any number of bytes.

    >>> ring_sent_bytes(1000, 3)
    1333
    """
    return passes * (processes - 1) * byte_count // processes


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
    """Infinite where exchanges took no longer for more bytes: then all is latency."""
    latency_seconds: float
    """For one round; 0 where all exchanges were so alike that it cannot be told apart from their bytes."""


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
        # The nearest with one of them 0: bytes alone, or rounds alone.
        if rt * rt / rr > bt * bt / bb:
            return LinkFit(math.inf, float(f"{rt / rr:.12g}"))
    return LinkFit(float(f"{bb / bt:.12g}"), 0.0)
