"""The same machines, more or fewer of them."""

from __future__ import annotations

from dataclasses import replace

from ..vocabulary.errors import ConfigError
from .cluster import Cluster, Tier


def with_ranks(cluster: Cluster, ranks: int) -> Cluster:
    """Return the cluster with `ranks` ranks: fewer, or more hosts like those that are known.

    Figures stay as they are: beyond the ranks that were measured they are extrapolated. Speeds of ranks that are
    not there are left out. Raises `ConfigError` for ranks that do not fill whole hosts, and for more than a host
    where nothing is known of a network.
    """
    if ranks == cluster.ranks:
        return cluster
    if ranks > cluster.ranks and len(cluster.tiers) == 1:
        count = "1 rank" if cluster.ranks == 1 else f"{cluster.ranks} ranks"
        measured = "measure on two hosts (farandole measure -H a:4,b:4), or add [[tiers]] for the network"
        has_network = "network" in cluster.fingerprint
        raise ConfigError(
            f"cluster {cluster.name!r} is one host of {count}, and {ranks} need a network",
            remedy=f"name the preset, which has one: --cluster {cluster.fingerprint['preset']}; or {measured}"
            if has_network
            else measured,
        )
    tiers: list[Tier] = []
    for tier in cluster.tiers:
        if tier is cluster.tiers[-1] or tier.ranks >= ranks:
            tiers.append(replace(tier, ranks=ranks))
            break
        check_hosts(ranks, tier.ranks, f"cluster {cluster.name!r}")
        tiers.append(tier)
    speeds = {rank: speed for rank, speed in cluster.rank_speeds.items() if rank < ranks}
    return replace(cluster, tiers=tuple(tiers), rank_speeds=speeds)


def check_hosts(ranks: int, per_host: int, what: str) -> None:
    """Raise `ConfigError` for ranks that are not a part of a host, or whole hosts."""
    if ranks < 1:
        raise ConfigError(f"{ranks} ranks: expected at least 1")
    if ranks > per_host and ranks % per_host:
        less = ranks - ranks % per_host
        raise ConfigError(
            f"{what}: {ranks} ranks do not fill hosts of {per_host}",
            remedy=f"take {less} or {less + per_host} ranks",
        )
