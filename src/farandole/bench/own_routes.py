"""The reducer's own ways to exchange, for ``farandole bench collectives``: connections, and memory inside hosts.

Each `make_` returns a callable as `collectives` asks for. Tensors lie in shared memory in the reducer, and here
they are copied into it, which is part of the time (the reducer does it when it loads a bucket), and not out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from ..comm.codecs.units import SEGMENT_ELEMENTS
from ..comm.messages import Message, Reduction, add_rows, reduce_scatter_all_gather
from ..comm.transport.comm_thread import CommThread, SegmentWork
from ..comm.transport.rank_group import RankGroup
from ..comm.transport.shared_tensor import SharedMemory, SharedTensor, Unavailable
from ..comm.transport.transport import Transport
from ..comm.world.store_sync import all_gather_json
from ..comm.world.world import World
from .intervals import NotMeasurable

Run = Callable[[torch.Tensor], torch.Tensor]
"""As `collectives` has it."""
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
