"""Which ranks share hosts, told by all ranks to all once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...comm.named_ops.engine import NamedOpsEngine
from ...comm.named_ops.operations import Request
from ...comm.world.world import World


@dataclass(frozen=True)
class Layout:
    """This rank's place across hosts, which only all hosts together know when they are unequal."""

    cross_rank: int
    cross_size: int
    is_homogeneous: bool


def find_layout(world: World, engine: NamedOpsEngine) -> Layout:
    """Exchange places; to be called by all ranks."""
    if world.size == 1:
        return Layout(0, 1, True)
    mine = torch.tensor([[world.node_rank, world.local_rank, world.local_size]])
    request = Request("init.layout", "allgather", mine)
    places: list[list[int]] = engine.submit([request])[0].wait().tolist()
    peers = sorted(node for node, local_rank, _ in places if local_rank == world.local_rank)
    return Layout(
        cross_rank=peers.index(world.node_rank),
        cross_size=len(peers),
        is_homogeneous=len({local_size for _, _, local_size in places}) == 1,
    )
