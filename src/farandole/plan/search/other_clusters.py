"""The same cluster with another link or memory: for questions such as "what if the link were faster"."""

from __future__ import annotations

from dataclasses import replace

from ...core.cluster.cluster import Cluster, CollectiveCost, Tier
from ...core.cluster.coefficient import Coefficient


def ranks_per_host(cluster: Cluster) -> int:
    """Return the ranks of the innermost tier; all, if there is one tier."""
    return cluster.tiers[0].ranks


def with_limit(cluster: Cluster, limit_bytes: int) -> Cluster:
    """Return the cluster, whose ranks may use so many bytes."""
    memory = replace(cluster.device.memory_bytes, value=float(limit_bytes), low=None, high=None)
    return replace(cluster, device=replace(cluster.device, memory_bytes=memory))


def with_faster_link(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster, whose outermost link has `factor` times the bytes per second."""
    outer = cluster.tiers[-1]
    faster: dict[str, CollectiveCost] = {
        name: replace(cost, bytes_per_second=_times(cost.bytes_per_second, factor))
        for name, cost in outer.collectives.items()
    }
    line, pair = (
        None if each is None else _times(each, factor)
        for each in (outer.line_bytes_per_second, outer.pair_bytes_per_second)
    )  # fmt: skip
    tier: Tier = replace(outer, collectives=faster, line_bytes_per_second=line, pair_bytes_per_second=pair)
    return replace(cluster, tiers=(*cluster.tiers[:-1], tier))


def _times(figure: Coefficient, factor: float) -> Coefficient:
    low, high = figure.interval()
    return replace(figure, value=figure.value * factor, low=low * factor, high=high * factor)
