"""`fd.seed`: every generator, alike on all ranks or each its own; what ranks agree on stays agreed."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import farandole as fd
from farandole.comm.world.store_sync import all_gather_json
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_same_bits, mlp


class Drawn(Dataset[list[float]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> list[float]:
        return draws()


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(())), float(torch.rand(3).sum())]


def of_worker() -> list[float]:
    loader: Any = DataLoader(Drawn(), num_workers=1, batch_size=None)
    return [float(value) for value in next(iter(loader))]


@ranks(1, 3)
def test_alike_or_of_each_rank() -> None:
    world = fd.init()
    assert fd.seed(7) == 7
    alike = draws() + of_worker()
    assert fd.seed(7, per_rank=True) == torch.initial_seed()
    own = draws() + of_worker()
    fd.seed(7, per_rank=True)
    assert draws() == own[:4]
    gathered = all_gather_json(world, "test/draws", [alike, own])
    assert all(other == alike for other, _ in gathered), "the same everywhere"
    assert gathered[0][1] == alike, "rank 0 is as one process"
    for column in zip(*(each for _, each in gathered), strict=True):
        assert len(set(column)) == world.size, column


@ranks(2)
def test_seeds_of_neighbouring_runs_share_nothing() -> None:
    world = fd.init()
    gathered = all_gather_json(world, "test/seeds", [fd.seed(number, per_rank=True) for number in range(5)])
    assert len({seed for each in gathered for seed in each}) == 10


@ranks(3)
def test_the_model_and_the_order_of_the_data_are_agreed_whatever_the_seeds() -> None:
    world = fd.init()
    fd.seed(3, per_rank=True)
    model = mlp(int(torch.randint(99, ())))
    fd.seed(3, per_rank=True)
    fd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert_same_bits(model)
    loader = fd.shard(DataLoader(TensorDataset(torch.arange(24)), batch_size=2, shuffle=True))
    seen = all_gather_json(world, "test/seen", [int(i) for (batch,) in loader for i in batch])
    assert sorted(i for each in seen for i in each) == list(range(24))


@ranks(2)
def test_ranks_with_different_or_wrong_seeds_are_told_on_all() -> None:
    world = fd.init()
    with pytest.raises(fd.Mismatch, match="seed is 0 on rank 0, 1 on rank 1"):
        fd.seed(world.rank)
    with pytest.raises(fd.Mismatch, match="per_rank"):
        fd.seed(0, per_rank=world.rank == 0)
    with pytest.raises(fd.Mismatch, match="-1"):
        fd.seed(-world.rank)


@pytest.mark.parametrize("number", [-1, 2**63, 1.5, True, "3"])
def test_a_wrong_seed_is_refused(number: Any) -> None:
    fd.init()
    with pytest.raises(fd.ConfigError, match="expected an integer from 0 to"):
        fd.seed(number)
    fd.shutdown()
