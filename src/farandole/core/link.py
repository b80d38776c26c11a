"""A link between ranks: measured by a probe or fitted to exchanges, and what an all-reduce over it takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Literal

# What an exchange takes, as formulas: pure functions, units in the names.
#
# The tuner predicts by them, buckets count by them, and reports compare with them: there is no second copy.


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


@dataclass(frozen=True)
class LinkModel:
    """What the link gives each rank.

    The latency-bandwidth model: Hockney, "The communication challenge for MPP", Parallel Computing 20(3), 1994.
    """

    bytes_per_second: float
    """Infinite where exchanges took no longer for more bytes: then all is latency."""
    latency_seconds: float
    """One round of small messages with all ranks; 0 where it could not be told apart from the bytes."""
    cpu_seconds_per_byte: float = 0.0
    """What sending or receiving takes of a core."""
    pair_seconds: float | None = None
    """One round of a small message with one rank alone, where that was measured."""

    def seconds(self, sent_bytes: float, rounds: float) -> float:
        """Return what an exchange takes in which this rank sends `sent_bytes` in `rounds`."""
        return communication_seconds(sent_bytes, self.bytes_per_second, rounds, self.latency_seconds)


SumKind = Literal["direct", "parts", "doubling"]


def sum_seconds(link: LinkModel, ranks: int, nbytes: int) -> dict[SumKind, float]:
    """Return what a sum of `nbytes` over `ranks` takes, by algorithm: rounds x latency + bytes / bandwidth.

    ``direct``: all to all in one round; ``parts``: reduce-scatter and all-gather; ``doubling``: a message to one
    rank in each of about log2 N rounds. A round's latency includes the cost of its messages. Source: Thakur,
    Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 2005.
    """
    bandwidth, latency = link.bytes_per_second, link.latency_seconds
    pair_seconds = latency if link.pair_seconds is None else link.pair_seconds
    rounds = doubling_rounds(ranks)
    return {
        "direct": communication_seconds((ranks - 1) * nbytes, bandwidth, 1, latency),
        "parts": communication_seconds(ring_bytes(nbytes, ranks), bandwidth, 2, latency),
        "doubling": communication_seconds(rounds * nbytes, bandwidth, rounds, pair_seconds),
    }


def doubling_rounds(ranks: int) -> int:
    """Return the rounds of a sum by recursive doubling: log2 N, and two more where N is no power of two."""
    power = ranks.bit_length() - 1
    return power + (2 if ranks > 1 << power else 0)


def fit_link(sent_bytes: Sequence[float], rounds: Sequence[float], seconds: Sequence[float]) -> LinkModel | None:
    """Return the link whose `communication_seconds` is nearest to what exchanges took, by least squares.

    Neither figure is negative. None without an exchange that sent something and took time.

    >>> fit_link([1e6, 4e6], [2, 2], [0.012, 0.042]) == LinkModel(bytes_per_second=1e8, latency_seconds=0.001)
    True
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
            return LinkModel(float(f"{1 / byte_seconds:.12g}"), float(f"{latency:.12g}"))
        # The nearest with one of them 0: bytes alone, or rounds alone.
        if rt * rt / rr > bt * bt / bb:
            return LinkModel(math.inf, float(f"{rt / rr:.12g}"))
    return LinkModel(float(f"{bb / bt:.12g}"), 0.0)


# How far the largest of many numbers is above their mean: what the slowest of many ranks takes.
#
# Source: David and Nagaraja, "Order Statistics", 2003, sections 4.2 and 4.6.

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
