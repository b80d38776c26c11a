"""How ranks of a group of the backend meet, with two threads at one store: whoever comes first, both are told."""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from farandole.comm.backend.create import meet
from farandole.comm.world.world import World
from farandole.core.vocabulary.errors import Mismatch, Stalled


def world(store: dist.Store, rank: int, size: int, timeout_seconds: float) -> World:
    here = World(rank, size, 0, 1, 0, 1, socket.gethostname(), None, torch.device("cpu"), "test", timeout_seconds)
    here.groups.store = store
    return here


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_that_mean_different_groups_are_both_told_at_once(late: int) -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    met: dict[int, BaseException | None] = {}
    groups = [[0, 1], [0, 1, 2]]

    def come(rank: int) -> None:
        time.sleep(0.1 if rank == late else 0)
        try:
            meet(world(store, rank, len(groups[rank]), 20.0), groups[rank], "host")
        except BaseException as problem:
            met[rank] = problem

    begin = time.monotonic()
    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [type(met[rank]) for rank in range(2)] == [Mismatch, Mismatch], met
    assert "a group of ranks [0, 1], another one a group of [0, 1, 2]" in str(met[0])
    assert time.monotonic() - begin < 10, "without waiting for the rank that will not come"


def test_who_does_not_come_is_named_by_the_number_in_the_job() -> None:
    with pytest.raises(Stalled, match=r"rank 4, making a group: ranks 6 and 9 did not come within 0\.1 s"):
        meet(world(dist.HashStore(), 0, 3, 0.1), [4, 6, 9], "host")
