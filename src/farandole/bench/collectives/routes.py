"""The routes that ``farandole bench collectives`` compares, by name: gloo's, and those of this package.

A route that cannot run in this world raises `NotMeasurable` with the reason. Importing this imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from ...comm.host_memory.shared_tensor import SharedMemory, SharedTensor, Unavailable
from ...comm.messages import Message, Reduction, add_rows, reduce_scatter_all_gather
from ...comm.sessions.units import SEGMENT_ELEMENTS
from ...comm.transport.comm_thread import CommThread, SegmentWork
from ...comm.transport.rank_group import RankGroup
from ...comm.transport.transport import Transport
from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ..measure.intervals import NotMeasurable

if TYPE_CHECKING:
    import torch

    from ...comm.world.world import World


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

    from ...comm.world.world import World


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

        return make_connections(operation, world)

    return make


def _hierarchical(world: World) -> Run:

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


# The reducer's own ways to exchange, for ``farandole bench collectives``: connections, and memory inside hosts.
#
# Each `make_` returns a callable as `routes` asks for. Tensors lie in shared memory in the reducer, and here they
# are copied into it, which is part of the time (the reducer does it when it loads a bucket), and not out of it.


_LINE_ELEMENTS = 16
"""Slices of shared tensors of float32 begin at multiples of this."""


class Connections:
    """A conductor over connections, closed with the world."""

    def __init__(self, world: World) -> None:
        self.everyone = RankGroup(tuple(range(world.size)), world.rank)
        self.conductor = CommThread(Transport(world, timeout_seconds=world.timeout_seconds))
        world.session.call_on_close(self.close)

    def close(self) -> None:
        """End the thread and the connections."""
        self.conductor.close()


def make_hierarchical(world: World) -> Run:
    """Return the all-reduce in shared memory inside hosts, over connections across.

    Raises `NotMeasurable` on one host.
    """
    places = all_gather_json(world, "benchmark of routes", [world.node_rank, world.local_rank])
    sizes = {sum(node == host for node, _ in places) for host, _ in places}
    if world.node_count == 1 or len(sizes) > 1 or sizes == {1}:
        raise NotMeasurable("needs several hosts of equally many ranks, two at least")
    across = RankGroup(tuple(r for r, (_, local) in enumerate(places) if local == world.local_rank), world.rank)
    try:
        memory = SharedMemory.connect(world, timeout_seconds=world.timeout_seconds)
    except Unavailable as problem:
        raise NotMeasurable(str(problem)) from None
    connections = Connections(world)
    tensors: dict[int, SharedTensor] = {}

    def run(tensor: torch.Tensor) -> torch.Tensor:
        count, unit = tensor.numel(), _LINE_ELEMENTS * world.size
        if count not in tensors:
            tensors[count] = memory.allocate(-(-count // unit) * unit, tensor.dtype)
        shared = tensors[count]
        found = shared.mine[:count].copy_(tensor)
        begin, end = shared.slice_bounds(world.local_rank)
        items = _sums(shared.mine[begin:end], across)
        connections.conductor.submit(items, prepare=shared.reduce_scatter, complete=shared.all_gather).wait()
        return found

    return run


def make_connections(operation: str, world: World) -> Run:
    """Return `operation` over our own connections."""
    connections = Connections(world)
    make_items: dict[str, Callable[[torch.Tensor, RankGroup], list[SegmentWork]]] = {
        "all_reduce": _sums,
        "reduce_scatter": _sums_of_parts,
        "all_gather": _gathers,
    }
    make = make_items[operation]

    def run(tensor: torch.Tensor) -> torch.Tensor:
        connections.conductor.submit(make(tensor, connections.everyone)).wait()
        return tensor.view(world.size, -1)[world.rank] if operation == "reduce_scatter" else tensor

    return run


def make_sums(connections: Connections, ranks: Sequence[int], rank: int) -> Run:
    """Return the all-reduce among `ranks` over our own connections, as a part of a hierarchical route."""
    circle = RankGroup(tuple(ranks), rank)

    def run(tensor: torch.Tensor) -> torch.Tensor:
        connections.conductor.submit(_sums(tensor, circle)).wait()
        return tensor

    return run


def _sums(flat: torch.Tensor, circle: RankGroup) -> list[SegmentWork]:
    """Add `flat` up in place, segment by segment."""
    segments = flat.split(SEGMENT_ELEMENTS * len(circle.ranks))
    return [
        SegmentWork(partial(reduce_scatter_all_gather, segment, circle.seat), partial(_land, segment), circle)
        for segment in segments
    ]


def _sums_of_parts(flat: torch.Tensor, circle: RankGroup) -> list[SegmentWork]:
    """Add up this rank's row of `flat`, (rank, part), in place."""
    columns = flat.view(len(circle.ranks), -1).split(SEGMENT_ELEMENTS, dim=1)
    mine = circle.seat.rank
    return [SegmentWork(partial(_sum_of_part, each), partial(_land, each[mine]), circle) for each in columns]


def _gathers(flat: torch.Tensor, circle: RankGroup) -> list[SegmentWork]:
    """Fill `flat`, (rank, part), from every rank's row of it."""
    columns = flat.view(len(circle.ranks), -1).split(SEGMENT_ELEMENTS, dim=1)
    mine = circle.seat.rank
    return [SegmentWork(partial(_gather, each[mine]), partial(_land, each), circle) for each in columns]


def _sum_of_part(rows: torch.Tensor) -> Reduction:
    received = yield Message(rows.clone(), "all_to_all")  # the caller may write to his while it is on its way
    return add_rows(received)


def _gather(part: torch.Tensor) -> Reduction:
    return (yield Message(part.clone(), "all_gather"))


def _land(target: torch.Tensor, result: torch.Tensor) -> None:
    target.copy_(result)
