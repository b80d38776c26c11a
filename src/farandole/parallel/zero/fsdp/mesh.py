"""The mesh of ranks that stage 3 shards over: our process groups as a `DeviceMesh` of torch.

All ranks are one dimension. With ``shard_within = "host"`` there are two: hosts, which hold copies of each other
(HSDP), and the ranks of a host, which hold shards.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .... import backend as _registered
from ....comm.world.world import World
from ....core.vocabulary.errors import PlanError
from ....core.vocabulary.spec import Plan

HOSTS, RANKS = "hosts", "ranks"
"""Names of the dimensions, before those of their groups."""


class _Meshes(dict[str, DeviceMesh]):
    """The meshes of one world, by what they shard within: tensors of several models meet in one norm."""


def make_mesh(here: World, plan: Plan, device_type: str, copies: int = 1) -> DeviceMesh:
    """Return the mesh that parameters are sharded over; to be called by all ranks.

    `copies`: sharded over as many runs of ranks, each of which has all parameters; 1: as ``shard_within`` says.

    CPU tensors travel by our own backend, those of an accelerator by the world's.

    Raises:
        PlanError: with ``shard_within = "host"`` where each host has one rank, so that nothing would be sharded.
    """
    meshes = here.session.keep(_Meshes, _Meshes)
    key = f"{plan.shard_within} {copies} {device_type} {plan.timeout_seconds}"
    if key not in meshes:
        meshes[key] = _make_mesh(here, plan, device_type, copies)
    return meshes[key]


def _make_mesh(here: World, plan: Plan, device_type: str, copies: int) -> DeviceMesh:
    """See `make_mesh`.

    torch keeps layouts by equal meshes, also of a world that is over, and looks groups up by name. So the name of
    the group is part of the mesh.
    """
    _registered.register()
    name = "farandole" if device_type == "cpu" else None
    if copies == 1 and (plan.shard_within == "world" or here.node_count == 1):
        group = here.new_group(timeout_seconds=plan.timeout_seconds, backend=name)
        assert group is not None, "several ranks have a group"
        return DeviceMesh.from_group(group, device_type, mesh_dim_names=(_named(RANKS, group),))
    if copies == 1 and here.local_size == 1:
        raise PlanError(
            f'plan: shard_within = "host", but each of the {here.node_count} hosts has one rank, so every rank '
            "would hold all parameters",
            remedy='set shard_within = "world"',
        )
    width = here.local_size if copies == 1 else here.size // copies
    cross, node = here.new_host_groups(width, timeout_seconds=plan.timeout_seconds, backend=name)
    ranks = torch.tensor(here.job_ranks, dtype=torch.int).view(-1, width)
    names = (_named(HOSTS, cross), _named(RANKS, node))
    return DeviceMesh.from_group([cross, node], device_type, mesh=ranks, mesh_dim_names=names)


def _named(dimension: str, group: dist.ProcessGroup) -> str:
    return f"{dimension}_{group.group_name}"
