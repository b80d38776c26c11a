"""What shards are divided over: all ranks of the world, or those of a host; and what a rank's shard is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.device_mesh import DeviceMesh

from ...comm.gradients.parameters import rows_of
from ...comm.world.world import World
from ...core.vocabulary.spec import Plan


def init_mesh(here: World) -> DeviceMesh:
    """Return a mesh of one dimension, "shard", of all ranks; to be called by all of them."""
    assert here.group is not None, "a world of one divides nothing"
    return DeviceMesh.from_group(here.group, here.device.type, mesh_dim_names=("shard",))


def shard_shape(here: World, plan: Plan) -> Callable[[torch.Tensor], torch.Size]:
    """Return a function that gives the shape of this rank's shard of a parameter, which may be sharded already.

    Parameters without dimensions are whole, and so are all without ``zero`` and in a world of one.
    """
    size, rank = here.size, here.rank
    if plan.shard_within == "host":
        size, rank = here.local_size, here.local_rank

    def shape_of(parameter: torch.Tensor) -> torch.Size:
        if not plan.zero or size == 1 or not parameter.dim():
            return parameter.shape
        begin, end = rows_of(parameter.shape[0], size, rank)
        return torch.Size([end - begin, *parameter.shape[1:]])

    return shape_of
