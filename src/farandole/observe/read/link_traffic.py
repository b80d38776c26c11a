"""Traffic of a rank to other hosts by link, as the kernel counted it, and the rate of each link in use.

[Note: bytes over busy time] The kernel knows for how long a connection had something on its way, and how much of
it arrived (`tcp_info`, tcp(7)). In a ring all ranks send the same and wait for the slowest, so their steps and
their bytes are alike; but a fast link is idle most of the time, and a slow one never. The quotient is the rate of
a link that is slow, and above it for all others: in this alone they differ. Time in which the other process did
not read is left out, or a slow rank would look like a slow link.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ...core.vocabulary.events import Started, Traffic

MOST_LINKS = 4096
"""Most links that are held of one rank."""
_LEAST_PART = 0.1
"""Fraction of the busiest link's bytes; less is not an exchange of gradients."""


@dataclass
class RankTraffic:
    """What one rank sent: bytes and busy seconds by (own address, address of the other host)."""

    sums: dict[tuple[str, str], tuple[int, float]] = field(default_factory=dict)

    seconds: float = 0.0
    """Time in which they were counted."""

    def add(self, traffic: Traffic) -> None:
        """Count what was sent since the previous such record."""
        self.seconds += traffic.span_seconds
        for link in traffic.links:
            key = (link.own_address, link.peer_address)
            if key not in self.sums and len(self.sums) >= MOST_LINKS:
                continue
            sent, busy = self.sums.get(key, (0, 0.0))
            self.sums[key] = (sent + link.sent_bytes, busy + link.busy_seconds)

    @property
    def own_addresses(self) -> set[str]:
        """Addresses of this rank's host that it sent from."""
        return {own for own, _ in self.sums}


class _Timeline(Protocol):
    started: Started
    traffic: RankTraffic


@dataclass(frozen=True)
class HostTraffic:
    """What one host sent to another, over all connections of their ranks."""

    source: str
    target: str
    sent_bytes: int
    bytes_per_second: float
    """Rate of a connection while data is in flight: see [Note: bytes over busy time]."""
    busy_share: float
    """Fraction of a rank's time with data in flight."""


def links_between_hosts(timelines: Sequence[_Timeline]) -> list[HostTraffic]:
    """Return the links that carried what ranks exchange; none where nothing was counted."""
    host_of = {address: each.started.host for each in timelines for address in each.traffic.own_addresses}
    sums: dict[tuple[str, str], tuple[int, float]] = {}
    for each in timelines:
        for (own, peer), (sent, busy) in each.traffic.sums.items():
            target = host_of.get(peer)
            if target is not None and target != host_of[own]:
                so_far = sums.get((host_of[own], target), (0, 0.0))
                sums[host_of[own], target] = (so_far[0] + sent, so_far[1] + busy)
    most = max((sent for sent, _ in sums.values()), default=0)
    lasted = max((each.traffic.seconds for each in timelines), default=0.0)
    ranks = Counter(each.started.host for each in timelines)
    return [
        HostTraffic(source, target, sent, sent / busy, busy / lasted / ranks[source])
        for (source, target), (sent, busy) in sums.items()
        if busy > 0 and lasted > 0 and sent >= _LEAST_PART * most
    ]
