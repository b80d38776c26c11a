"""What a rank sent to other hosts, way by way, as the kernel counted it: how fast each is while it is used.

[Note: bytes over busy time] The kernel knows for how long a connection had something on its way, and how much of
it arrived (`tcp_info`, tcp(7)). In a ring all ranks send the same and wait for the slowest, so their steps and
their bytes are alike; but a fast way is empty most of the time, and a slow one never. The quotient is the rate of
a way that is slow, and above it for all others: in this alone they differ. Time in which the other process did not
read is left out, or a slow rank would look like a slow link.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core.events import Traffic

MOST_WAYS = 4096
"""That are held of one rank."""


@dataclass
class Ways:
    """Bytes and busy seconds by (own address, address of the other host)."""

    sums: dict[tuple[str, str], tuple[int, float]] = field(default_factory=dict)

    seconds: float = 0.0
    """Time in which they were counted."""

    def add(self, traffic: Traffic) -> None:
        """Count what was sent since the previous such record."""
        self.seconds += traffic.span_seconds
        for way in traffic.ways:
            key = (way.own_address, way.peer_address)
            if key not in self.sums and len(self.sums) >= MOST_WAYS:
                continue
            sent, busy = self.sums.get(key, (0, 0.0))
            self.sums[key] = (sent + way.sent_bytes, busy + way.busy_seconds)

    @property
    def own_addresses(self) -> set[str]:
        """Addresses of this rank's host that it sent from."""
        return {own for own, _ in self.sums}
