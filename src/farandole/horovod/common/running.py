"""The state of the running job between `init` and `shutdown`, for all front ends. The world's session owns it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...comm.world.world import World
    from ...core.job_plan import HorovodVariables, JobPlan
    from ...observe.export.operation_timeline import OperationTimeline
    from ..named_ops.engine import NamedOpsEngine

NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."


class Running:
    """What there is between `init` and `shutdown`."""

    def __init__(
        self,
        world: World,
        engine: NamedOpsEngine,
        settings: HorovodVariables,
        log: OperationTimeline,
        plan: JobPlan,
    ) -> None:
        self.world = world
        self.plan = plan
        self.engine = engine
        self.settings = settings
        self.log = log
        self.dynamic_process_sets = settings.dynamic_process_sets
        self.plan_is_applied = False
        """Whether gradients travel as the plan says, by a front end that counts no steps."""
        self.said_auto_is_exact = False
        """Whether it was said that codec auto chooses nothing."""
        self.layout: Layout


def find_running() -> Running | None:
    """Return what `init` made, which the world's session keeps; None before it and after `shutdown`.

    In a forked child it is the parent's, until the child is a rank itself.
    """
    from ...comm.world.world import current

    world = current.world or current.parents
    return None if world is None else world.session.kept(Running)


def get_running() -> Running:
    """Return what `init` made; raise ValueError before it and after `shutdown`."""
    running = find_running()
    if running is None:
        raise ValueError(NOT_INITIALIZED)
    return running


def is_parents() -> bool:
    """Return whether what is running is the parent's, in a forked child that is no rank."""
    running = find_running()
    return running is not None and running.world.in_forked_child


# Which ranks share hosts, told by all ranks to all once.


@dataclass(frozen=True)
class Layout:
    """This rank's place across hosts, which only all hosts together know when they are unequal."""

    cross_rank: int
    cross_size: int
    is_homogeneous: bool


def find_layout(world: World, engine: NamedOpsEngine) -> Layout:
    """Exchange places; to be called by all ranks."""
    import torch

    from ..named_ops.operations import Request

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
