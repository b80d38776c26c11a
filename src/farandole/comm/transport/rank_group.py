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
