"""The ranks of one node, where a scheduler starts ``farandole run`` once on every node."""

from __future__ import annotations

from ...core.host.interfaces import interface_of_node
from ...core.launchers.launcher_env import NodeInfo
from ...core.vocabulary.errors import ConfigError
from .contract import RankSpec
from .host_list import MOST_SLOTS
from .hosts import LOOPBACK


def ranks_per_node(node: NodeInfo, size: int | None) -> int:
    """Return how many ranks each node has when the job has `size`; None: what the scheduler says.

    Raises `ConfigError` when that is not known, and for a size that does not spread evenly.
    """
    if size is None:
        if node.slots is None:
            raise ConfigError(
                f"{node.source} says that this is node {node.node_rank} of {node.node_count}, not how many ranks "
                "a node has",
                remedy=f"give -np, the ranks of all nodes: for one a node -np {node.node_count}",
            )
        return node.slots
    if size % node.node_count:
        raise ConfigError(
            f"-np {size} on {node.node_count} nodes ({node.source}): every node takes the same number of ranks",
            remedy=f"give a multiple of {node.node_count}; -np counts the ranks of all nodes",
        )
    if size // node.node_count > MOST_SLOTS:
        raise ConfigError(f"-np {size}: expected at most {MOST_SLOTS} on one host")
    return size // node.node_count


def node_interface(node: NodeInfo) -> str:
    """Return the interface that leads to the other nodes; "" where it is not known, or all are this machine."""
    if node.address == LOOPBACK:
        return ""
    return interface_of_node(node.address, [node.second] if node.second else [], is_first=node.node_rank == 0)


def node_places(node: NodeInfo, per_node: int) -> list[RankSpec]:
    """Return the places of this node's ranks."""
    interface = node_interface(node)
    first = node.node_rank * per_node
    return [
        RankSpec(
            first + local, per_node * node.node_count, local, per_node,
            node.node_rank, node.node_count, interface=interface,
        )
        for local in range(per_node)
    ]  # fmt: skip
