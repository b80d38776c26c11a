"""Which rank runs where: hosts are filled in their order, and may have different numbers of slots.

[Note: cross rank] Ranks with the same local rank on different hosts form a group across hosts.
`cross_rank` is the index among the hosts that *have* this local rank, `cross_size` their number: on
hosts of 1 and 2 slots, local rank 1 is alone in its group. `node_rank` counts all hosts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...core.vocabulary.errors import ConfigError
from .contract import RankSpec
from .host_list import HostSlots
from .hosts import EmulatedHost


def assign_ranks(hosts: Sequence[HostSlots], size: int) -> list[RankSpec]:
    """Return the place of each of `size` ranks; hosts that get none do not count.

    Raises `ConfigError` when the hosts have too few slots.
    """
    slots = [(node, local) for node, host in enumerate(hosts) for local in range(host.slots)]
    if size > len(slots):
        raise ConfigError(
            f"Requested more processes ({size}) than there are available slots ({len(slots)})",
            remedy=f"lower -np, or add slots to {', '.join(host.name for host in hosts)}",
        )
    slots = slots[:size]
    local_sizes = Counter(node for node, _ in slots)
    cross_sizes = Counter(local for _, local in slots)
    seen: Counter[int] = Counter()
    placed = []
    for rank, (node, local) in enumerate(slots):
        host = hosts[node]
        placed.append(
            RankSpec(
                rank, size, local, local_sizes[node], node, len(local_sizes),
                host=host.namespaces if isinstance(host, EmulatedHost) else None, host_name=host.name,
                cross_rank=seen[local], cross_size=cross_sizes[local], visible_devices=host.chosen,
            )
        )  # fmt: skip
        seen[local] += 1
    return placed
