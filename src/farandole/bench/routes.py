"""The routes that ``farandole bench collectives`` compares, by name: gloo's, and those of this package.

A route that cannot run in this world raises `NotMeasurable` with the reason. Importing this imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .intervals import NotMeasurable

if TYPE_CHECKING:
    import torch

    from ..comm.world.world import World


# What a route is, for ``farandole bench collectives``: a way for ranks to reduce and gather a tensor.
#
# A route makes, for the world it is in, one callable for each operation it knows. That callable takes the whole
# tensor, float32 and one-dimensional, its length a multiple of the number of ranks, and returns the tensor with
# the result:
#
# - all_reduce: the sum over the ranks, in place or where the route has it;
# - reduce_scatter: this rank's part of the sum (the input may be overwritten);
# - all_gather: the whole, of which this rank's part was given in its place.


OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")
Run = Callable[["torch.Tensor"], "torch.Tensor"]
Make = Callable[["World"], Run]


@dataclass(frozen=True)
class CollectiveRoute:
    """A way to exchange. None: it has no such operation."""

    what: str
    all_reduce: Make
    reduce_scatter: Make | None = None
    all_gather: Make | None = None

    def make(self, operation: str, world: World) -> Run:
        """Return the callable of `operation`; raise `NotMeasurable` when there is none here."""
        make: Make | None = getattr(self, operation)
        if make is None:
            raise NotMeasurable(f"has no {operation}")
        return make(world)


if TYPE_CHECKING:
    import torch

    from ..comm.world.world import World


def _gloo_all_reduce(world: World) -> Run:
    import torch.distributed as dist

    def run(tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor, group=world.group)
        return tensor

    return run


def _gloo_reduce_scatter(world: World) -> Run:
    import torch.distributed as dist

    part = _parts(world)
    # Torch is about to give its own a new name.
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def run(tensor: torch.Tensor) -> torch.Tensor:
        out = part(tensor)
        scatter(out, tensor, group=world.group)
        return out

    return run


def _gloo_all_gather(world: World) -> Run:
    import torch.distributed as dist

    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def run(tensor: torch.Tensor) -> torch.Tensor:
        mine = tensor.view(world.size, -1)[world.rank]
        gather(tensor, mine, group=world.group)
        return tensor

    return run


def _connections(operation: str) -> Make:
    def make(world: World) -> Run:
        from .own_routes import make_connections

        return make_connections(operation, world)

    return make


def _hierarchical(world: World) -> Run:
    from .own_routes import make_hierarchical

    return make_hierarchical(world)


def _parts(world: World) -> Run:
    """Return what gives room for one rank's part of a tensor; the same room for the same length."""
    rooms: dict[int, torch.Tensor] = {}

    def room(tensor: torch.Tensor) -> torch.Tensor:
        count = tensor.numel() // world.size
        if count not in rooms:
            rooms[count] = tensor.new_empty(count)
        return rooms[count]

    return room


ROUTES: dict[str, CollectiveRoute] = {
    "gloo": CollectiveRoute("gloo's own collectives", _gloo_all_reduce, _gloo_reduce_scatter, _gloo_all_gather),
    "connections": CollectiveRoute("ours, over our own connections", *map(_connections, OPERATIONS)),
    "hierarchical": CollectiveRoute("ours, shared memory inside hosts and connections across", _hierarchical),
}
