"""Uneven data: ranks that are done contribute zeros until all are."""

from __future__ import annotations

import functools
import time
from typing import Any

import pytest
import torch
from torch import nn

import farandole.horovod.torch as hvd
from tests.ranks.pool import ranks


@pytest.mark.full("further")
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


@pytest.mark.full("further")
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


def distributed(count: int, **keywords: Any) -> list[tuple[nn.Linear, Any]]:
    """Return models of different widths, each with its optimizer. The first two are alike."""
    made = []
    for width in (2, 2, 5)[:count]:
        model = nn.Linear(width, 1, bias=False)
        nn.init.zeros_(model.weight)
        made.append((model, hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1.0), **keywords)))
    return made


def step(model: nn.Linear, optimizer: Any) -> None:
    """Make a step whose own gradient is all ones."""
    optimizer.zero_grad()
    model.weight.sum().backward()
    optimizer.step()


@pytest.mark.full("further")
@pytest.mark.parametrize("count", [1, 2, 3])
@ranks(3)
def test_a_join_before_the_first_step_is_a_barrier(count: int) -> None:
    hvd.init()
    made = distributed(count, backward_passes_per_step=1 if count < 3 else 2)
    for late in (2, 0):
        if hvd.rank() == late:
            time.sleep(0.1)  # the others look for what to serve meanwhile
        assert len(set(hvd.allgather(torch.tensor([hvd.join()])).tolist())) == 1
    for model, optimizer in made:
        assert optimizer._farandole_path == "reducer"
        step(model, optimizer)
        assert (model.weight == -1).all()
    hvd.join()
    for model, optimizer in reversed(made):
        step(model, optimizer)
        assert (model.weight == -2).all()


@pytest.mark.full("further")
@pytest.mark.parametrize("trained", [(0,), (2, 0), (1, 0, 2, 2, 1)])
@ranks(3)
def test_a_rank_without_data_joins_before_optimizers_that_are_new(trained: tuple[int, ...]) -> None:
    hvd.init()
    made = distributed(3)
    if hvd.rank() == 0:
        time.sleep(0.1)  # those that train have begun to connect when this one joins
    if hvd.rank() == 1:
        for which in trained:
            step(*made[which])
    if hvd.rank() == 2:
        for which in trained:
            step(*made[which])
    last = hvd.join()
    for which, (model, _) in enumerate(made):
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        torch.testing.assert_close(model.weight, torch.full_like(model.weight, -trained.count(which) * 2 / 3))
    for model, optimizer in made:
        before = model.weight.detach().clone()
        step(model, optimizer)
        assert torch.equal(model.weight, before - 1)


@ranks(2)
def test_a_rank_that_waits_in_join_hears_of_one_that_leaves() -> None:
    hvd.init()
    made = distributed(2)
    if hvd.rank() == 1:
        time.sleep(0.2)
        hvd.shutdown()
        return
    with pytest.raises(hvd.HorovodPeerLostError, match=r"rank 1 \(on .*\) has left"):
        hvd.join()
    del made


@ranks(2)
def test_gradients_that_the_joined_rank_does_not_have_are_refused() -> None:
    hvd.init()
    made = distributed(2 + hvd.rank())
    use = hvd.join if hvd.rank() == 0 else functools.partial(step, *made[-1])
    with pytest.raises(hvd.HorovodMismatchError, match="rank 0 joined without the distributed optimizer"):
        use()
