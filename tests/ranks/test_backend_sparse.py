"""Sparse all-reduce of the backend "farandole": beside gloo, under DDP and under `fd.distribute`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import farandole as fd
from farandole.core.vocabulary.errors import Mismatch
from tests.ranks.pool import ranks, takes
from tests.ranks.test_backend import as_if_apart, make

SHAPES = [((50,), 1), ((50, 3), 1), ((7, 9), 2), ((4, 5, 6, 2), 3), ((3, 0), 1)]
"""Shape of a tensor, and how many of its dimensions are sparse."""
DTYPES = [torch.float32, torch.float64, torch.int64, torch.complex64]


def sparse(shape: tuple[int, ...], dimensions: int, rows: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a sparse tensor whose indices come more than once, in no order."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.stack([torch.randint(count, (rows,), generator=generator) for count in shape[:dimensions]])
    values = (8 * torch.randn(rows, *shape[dimensions:], generator=generator)).to(dtype)
    return torch.sparse_coo_tensor(indices, values, shape)


def of_all(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
    found = [torch.empty_like(tensor) for _ in range(fd.world().size)]
    dist.all_gather(found, tensor, group=group)
    return found


@pytest.mark.gate_cases("2-messages")
@takes(60)
@pytest.mark.parametrize("apart", [False, True], ids=["one host", "messages"])
@ranks(2, 3)
def test_sums_are_those_of_gloo_and_equal_on_all_ranks(apart: bool) -> None:
    here = fd.init()
    with as_if_apart(apart):
        group = make()
    gloo = dist.new_group(backend="gloo")
    for number, (shape, dimensions) in enumerate(SHAPES):
        for dtype in DTYPES:
            for rows in (0, 1, 5 + 9 * here.rank, 200 * (here.rank == 1)):
                mine = sparse(shape, dimensions, rows, dtype, seed=100 * number + here.rank)
                if rows % 2:
                    mine = mine.coalesce()
                before = mine.to_dense()
                # Of complex ones gloo's sum is lost in torch: the sum of dense ones stands for it.
                expected = mine.to_dense() if dtype.is_complex else mine.clone()
                dist.all_reduce(expected, group=gloo)
                work = dist.all_reduce(mine, group=group, async_op=True)
                assert work is not None, "asynchronous"
                work.wait()
                assert mine.is_coalesced(), (shape, dtype, rows)
                assert mine.shape == before.shape, (shape, dtype, rows)
                expected = expected.to_dense() if expected.is_sparse else expected
                torch.testing.assert_close(mine.to_dense(), expected, rtol=1e-5, atol=1e-5)
                dense = mine.to_dense()
                dense = torch.view_as_real(dense) if dense.is_complex() else dense
                assert all(torch.equal(each, dense) for each in of_all(dense, gloo)), (shape, dtype, rows)
                mine.mul_(2)  # it can be written to afterwards


@ranks(3)
def test_narrow_floats_are_rounded_once_and_means_divided() -> None:
    here = fd.init()
    group = make()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        mine = sparse((40, 2), 1, 30, dtype, seed=here.rank).coalesce()
        whole = torch.stack([each.float() for each in of_all(mine.to_dense(), group)])
        total, mean = mine.clone(), mine.clone()
        dist.all_reduce(total, group=group)
        dist.all_reduce(mean, dist.ReduceOp.AVG, group=group)
        expected = (whole[0] + whole[1] + whole[2]).to(dtype)
        assert torch.equal(total.to_dense(), expected), f"{dtype}: another sum"
        assert torch.equal(mean.to_dense(), ((whole[0] + whole[1] + whole[2]) / 3).to(dtype)), f"{dtype}: mean"
    whole = torch.sparse_coo_tensor(torch.tensor([[here.rank, 5]]), torch.tensor([7, -1]), (9,))
    dist.all_reduce(whole, dist.ReduceOp.AVG, group=group)
    assert whole.to_dense().tolist() == [2, 2, 2, 0, 0, -1, 0, 0, 0], "the mean of whole numbers, toward zero"
    flags = torch.sparse_coo_tensor(torch.tensor([[here.rank, 5]]), torch.tensor([True, True]), (9,))
    dist.all_reduce(flags, group=group)
    assert flags.to_dense().tolist() == [True, True, True, False, False, True, False, False, False], "or"


@ranks(2)
def test_what_it_has_not_is_refused_and_differing_calls_are_named() -> None:
    here = fd.init()
    group = make()
    mine = sparse((9, 2), 1, 4, torch.float32, seed=1)
    with pytest.raises(NotImplementedError, match="MAX of sparse tensors"):
        dist.all_reduce(mine, dist.ReduceOp.MAX, group=group)
    with pytest.raises(NotImplementedError, match="sparse_coo"):
        dist.broadcast(mine, 0, group=group)
    dist.all_reduce(mine, group=group)  # the group goes on
    other = sparse((9, 2), 1 + here.rank, 4, torch.float32, seed=1)
    with pytest.raises(Mismatch, match="a sparse float32 of"):
        dist.all_reduce(other, group=group)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(31, 6, sparse=True)
        self.last = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.table(x).mean(1)).tanh()
        return out


def words(step: int, rank: int) -> torch.Tensor:
    return torch.randint(31, (4, 3), generator=torch.Generator().manual_seed(10 * step + rank))


def trained(model: Any, plain: nn.Module, ranks_joined: range) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(plain.parameters(), 0.5)
    if model == "fd":
        fd.distribute(plain, optimizer)
        model = plain
    for step in range(5):
        optimizer.zero_grad()
        model(torch.cat([words(step, rank) for rank in ranks_joined])).square().mean().backward()
        assert plain.table.weight.grad.is_sparse, "the rows alone travel"  # type: ignore[union-attr]
        optimizer.step()
    return [each.detach().clone() for each in plain.parameters()]


def require_joined(found: list[torch.Tensor], group: Any) -> None:
    for one, other in zip(found, trained(alone := Words(), alone, range(fd.world().size)), strict=True):
        torch.testing.assert_close(one, other)
        assert all(torch.equal(each, one) for each in of_all(one, group)), "ranks differ"


@takes(60)
@ranks(2, 3)
def test_an_embedding_under_ddp_trains_as_one_process() -> None:
    here = fd.init()
    group = make()
    plain = Words()
    model = DistributedDataParallel(plain, process_group=group)
    require_joined(trained(model, plain, range(here.rank, here.rank + 1)), group)


@takes(60)
@ranks(2, 3)
def test_an_embedding_under_fd_distribute_trains_as_one_process() -> None:
    here = fd.init(backend="farandole")
    require_joined(trained("fd", Words(), range(here.rank, here.rank + 1)), None)
