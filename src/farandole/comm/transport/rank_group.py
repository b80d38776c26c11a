"""Ranks that exchange messages with each other, and what they exchange at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..messages import GroupRank, Message


@dataclass(frozen=True)
class RankGroup:
    """Ranks that exchange messages, and this rank among them."""

    ranks: tuple[int, ...]
    """World ranks, ascending."""
    rank: int
    """This rank in the world."""
    seat: GroupRank = field(init=False, repr=False, compare=False)
    """This rank in the group."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "seat", GroupRank(self.ranks.index(self.rank), len(self.ranks)))


@dataclass(frozen=True, slots=True)
class PieceExchange:
    """A round in which ranks exchange pieces of any length; who receives one has room of its size.

    What is sent must not change before it has arrived: see [Note: who may write when] in `comm.messages`.
    """

    outgoing: Sequence[torch.Tensor]
    """For each rank of the group; nothing is sent of an empty one, nor to this rank."""
    incoming: Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Within:
    """A round among other ranks than those of the conversation that it is a part of."""

    group: RankGroup
    message: Message


# Which ranks of an operation share a host: large sums are added up there before anything crosses to another.
#
# Each rank of a host takes one slice, 1/G of the tensor for G ranks a host, adds it up for its host, and
# exchanges it with the ranks of the other hosts that have the same slice. A host's link then carries 2 (M-1)/M S
# bytes for M hosts, where N ranks that send to each other directly carry 2 G (N-G)/N S.


@dataclass(frozen=True)
class HostGroups:
    """The ranks of one operation, as this rank sees them."""

    inside: RankGroup
    """Those of this host."""
    across: RankGroup
    """Those of all hosts that carry this rank's slice."""


def host_groups(ranks: Sequence[int], rank: int, hosts: Sequence[int]) -> HostGroups | None:
    """Return the groups of `rank` among `ranks` (world ranks, ascending); None where hosts make no difference.

    So it is on one host, with one rank a host, and with hosts of different numbers of ranks.

    Args:
        ranks: those that take part.
        rank: this one.
        hosts: the number of each world rank's host.
    """
    by_host: dict[int, list[int]] = {}
    for each in ranks:
        by_host.setdefault(hosts[each], []).append(each)
    groups = list(by_host.values())
    sizes = {len(group) for group in groups}
    if len(groups) < 2 or len(sizes) > 1 or sizes == {1}:
        return None
    inside = by_host[hosts[rank]]
    place = inside.index(rank)
    return HostGroups(RankGroup(tuple(inside), rank), RankGroup(tuple(sorted(g[place] for g in groups)), rank))
