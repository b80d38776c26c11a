"""Uneven data: ranks that are done contribute zeros until all are."""

from __future__ import annotations

import time

import pytest
import torch

import farandole.horovod.torch as hvd
from tests.ranks.pool import ranks


@ranks(3)
def test_the_last_rank_that_joined_and_the_zeros_of_the_others() -> None:
    hvd.init()
    for last in (0, 1, 2):
        if hvd.rank() == last:
            time.sleep(0.2)
            total = hvd.allreduce(torch.full((5,), 3.0), op=hvd.Sum, name="alone")
            assert total.tolist() == [3.0] * 5
            assert hvd.allreduce(torch.full((2,), 3.0), name="mean").tolist() == [1.0, 1.0]  # of three ranks
            grouped = hvd.grouped_allreduce([torch.ones(2), torch.arange(2)], op=hvd.Sum)
            assert grouped[1].tolist() == [0, 1]
            assert hvd.allreduce(torch.ones(300_000), op=hvd.Sum)[-1].item() == 1.0
        found = hvd.join()
        assert type(found) is int
        assert found == last
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3.0


@ranks(2)
def test_what_is_refused_while_somebody_has_joined() -> None:
    hvd.init()
    if hvd.rank() == 0:
        time.sleep(0.2)
        for name, call in (
            ("Allgather", lambda: hvd.allgather(torch.ones(2))),
            ("Broadcast", lambda: hvd.broadcast(torch.ones(2), 0)),
            ("Alltoall", lambda: hvd.alltoall(torch.ones(2))),
            ("Reducescatter", lambda: hvd.reducescatter(torch.ones(2))),
        ):
            with pytest.raises(hvd.HorovodInternalError, match=f"{name} is not supported with Join at this time"):
                call()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 1.0
    assert hvd.join(device=0) == 0
    assert hvd.allgather(torch.ones(1)).tolist() == [1.0, 1.0]


@ranks(2)
def test_uneven_epochs() -> None:
    hvd.init()
    for _ in range(3):
        for step in range(5 + 3 * hvd.rank()):
            mean = hvd.allreduce(torch.full((4,), 2.0), name="gradient")
            assert mean[0].item() == (2.0 if step < 5 else 1.0)
        assert hvd.join() == 1


@ranks(3)
def test_there_is_no_join_without_a_rank_that_has_left() -> None:
    hvd.init()
    gone = hvd.rank() == 2
    hvd.barrier()
    if gone:
        hvd.shutdown()
        return
    time.sleep(0.3 * hvd.rank())  # rank 0 waits when rank 2 leaves; rank 1 joins when both have
    with pytest.raises(hvd.HorovodPeerLostError, match=r"rank 2 \(on .*\) has left"):
        hvd.join()
