"""What an exchange takes, as formulas: pure functions, units in the names.

The tuner predicts by them, buckets count by them, and reports compare with them: there is no second copy.
"""

from __future__ import annotations


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
