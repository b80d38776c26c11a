"""Medians and their intervals: those of `core`, under the name that benchmarks use."""

from __future__ import annotations

from ..core.host.process_status import interface_bytes
from ..core.link import communication_seconds, ring_sent_bytes
from ..core.step_model import Interval, median_interval, nested_interval, nested_ratio, paired_ratio

__all__ = ["Interval", "median_interval", "nested_interval", "nested_ratio", "paired_ratio"]


# What a benchmark says of something it cannot measure.


class NotMeasurable(Exception):
    """This cannot run here; the message says why. It gets no number."""


# What an exchange must send at least, how long a link takes for it, and what the kernel counted.

PAYLOAD_SHARE = 0.956
"""Share of a link's rate that frames of 1500 bytes leave for the payload of TCP (1448 of 1514 bytes)."""
PASSES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
"""How often (N-1)/N of the data must leave a host, for each operation."""


def least_bytes(operation: str, byte_count: int, parties: int) -> int:
    """Return the bytes each of `parties` hosts (or ranks) must send: (N-1)/N S, twice for an all-reduce."""
    return ring_sent_bytes(byte_count, parties, PASSES[operation])


def bound_seconds(byte_count: float, bits_per_second: float) -> float:
    """Return the time in which a link of this rate sends so many bytes, headers paid for."""
    return communication_seconds(byte_count, PAYLOAD_SHARE * bits_per_second / 8)


def sent_bytes(*, loopback: bool) -> int:
    """Return what this host has sent so far: over its links, or over its loopback (by all processes)."""
    return sum(sent for name, (sent, _) in interface_bytes().items() if (name == "lo") == loopback)
