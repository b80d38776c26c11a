"""Which rank sits where: hosts are filled in their order, and may have different numbers of slots.

[Note: cross rank] Ranks with the same local rank on different hosts form a circle across hosts.
`cross_rank` is the index among the hosts that *have* this local rank, `cross_size` their number: on
hosts of 1 and 2 slots, local rank 1 is alone in its circle. `node_rank` counts all hosts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ...core.vocabulary.errors import ConfigError
from .host_list import HostSlots


@dataclass(frozen=True)
class RankAssignment:
    """The place of one rank in a list of hosts."""

    rank: int
    host: HostSlots
    local_rank: int
    local_size: int
    """Ranks that really start on this host, not its slots."""
    node_rank: int
    node_count: int
    cross_rank: int
    cross_size: int


def assign_ranks(hosts: Sequence[HostSlots], size: int) -> list[RankAssignment]:
    """Return the seats of `size` ranks; hosts that get none do not count.

    Raises `ConfigError` when the hosts have too few slots.
    """
    seats = [(node, local) for node, host in enumerate(hosts) for local in range(host.slots)]
    if size > len(seats):
        raise ConfigError(
            f"Requested more processes ({size}) than there are available slots ({len(seats)})",
            remedy=f"lower -np, or add slots to {', '.join(host.name for host in hosts)}",
        )
    seats = seats[:size]
    crowd = Counter(node for node, _ in seats)
    across = Counter(local for _, local in seats)
    seen: Counter[int] = Counter()
    placed = []
    for rank, (node, local) in enumerate(seats):
        placed.append(
            RankAssignment(rank, hosts[node], local, crowd[node], node, len(crowd), seen[local], across[local])
        )  # fmt: skip
        seen[local] += 1
    return placed
