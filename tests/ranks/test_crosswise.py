"""Ranks of two hosts send crosswise while the receivers wait at their hosts' barriers: nobody waits for ever."""

from __future__ import annotations

import time

import torch

import farandole as fd
from farandole.comm.messages import Message, Reduction, reduce_scatter_all_gather
from farandole.comm.routes import connect_route
from farandole.comm.transport.comm_thread import CommThread, SegmentWork
from farandole.comm.transport.shared_tensor import SharedMemory
from tests.ranks.pool import ranks
from tests.ranks.test_routes import pretend_two_hosts

MANY_ELEMENTS = 3 * 2**20
"""More than the kernel takes for a rank that does not read."""
TIMEOUT_SECONDS = 15.0


@ranks(4, FARANDOLE_LOCAL_SIZE="2", FARANDOLE_NODE_COUNT="2")
def test_barriers_go_on_receiving() -> None:
    """Ranks 0 and 3 have run ahead: they send to 2 and 1, which wait at barriers for 3 and 0."""
    pretend_two_hosts()
    world = fd.init()
    plan = fd.Plan(codec="int8", timeout_seconds=TIMEOUT_SECONDS)
    lines = connect_route(world, plan, needs_messages=True, parameter_bytes=8 * MANY_ELEMENTS)
    conductor, memory = lines.conductor, lines.memory
    assert isinstance(conductor, CommThread)
    assert isinstance(memory, SharedMemory)
    shared = memory.allocate(8192, torch.float32)
    shared.mine.fill_(world.rank)
    runs_ahead = world.rank in (0, 3)
    large: list[torch.Tensor] = []

    def small() -> Reduction:
        if runs_ahead:
            time.sleep(0.2)  # until the other job is submitted as well
        return (yield from reduce_scatter_all_gather(torch.ones(4, dtype=torch.float32), lines.across.seat))

    def among_all() -> Reduction:
        mine = torch.full((MANY_ELEMENTS,), 1.0 + world.rank, dtype=torch.float32)
        received = yield Message(mine, "all_gather")
        return received.sum(0)

    matrices = [SegmentWork(among_all, large.append, lines.everyone)]
    begin = time.monotonic()
    first = conductor.submit([SegmentWork(small, lambda _: None, lines.across)], complete=shared.all_reduce)
    if not runs_ahead:
        first.wait()
    second = conductor.submit(matrices)
    first.wait()
    assert time.monotonic() - begin < TIMEOUT_SECONDS, "it was not the time-out that ended it"
    second.wait()
    assert bool((large[0] == 10).all())
    assert bool((shared.mine == (1 if world.rank < 2 else 5)).all())
    lines.close(world)
