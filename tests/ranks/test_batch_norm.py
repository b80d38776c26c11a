"""BatchNorm, plain and synchronised, and other buffers that change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import farandole as fd
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_close, assert_same_bits, data, own


def convolutional() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8),
        nn.BatchNorm1d(8, affine=False), nn.Linear(8, 3, bias=False), nn.BatchNorm1d(3, momentum=None),
    )  # fmt: skip


def images(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = data(count, width=32)
    return x.view(count, 2, 4, 4), y


@pytest.mark.parametrize("count", [12, 14])
@ranks(3)
def test_synchronised_batch_norm_is_that_of_one_process(count: int) -> None:
    fd.init()
    model, reference = convolutional(), convolutional()
    keys = list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    fd.distribute(model, optimizer, fd.Plan(sync_batch_norm=True))
    assert list(model.state_dict()) == keys
    assert isinstance(model[1], nn.BatchNorm2d)
    other = torch.optim.SGD(reference.parameters(), 0.05)
    rows = TensorDataset(*images(count))
    for _ in range(3):
        for network, stepper, loader in (
            (model, optimizer, fd.shard(DataLoader(rows, batch_size=6), split=True)),
            (reference, other, DataLoader(rows, batch_size=6)),
        ):
            for x, y in loader:
                stepper.zero_grad()
                nn.functional.mse_loss(network(x), y).backward()
                stepper.step()
    assert_close(model, reference, rtol=1e-4, atol=1e-5)
    assert_same_bits(model)
    model.eval()
    reference.eval()
    x, _ = images(5)
    torch.testing.assert_close(model(x), reference(x), rtol=1e-4, atol=1e-5)


@ranks(3)
def test_plain_batch_norm_keeps_the_mean_of_the_ranks_statistics() -> None:
    world = fd.init()
    model: Any = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fd.distribute(model, optimizer)
    x, y = data(12)
    expected = torch.zeros(3)
    with torch.no_grad():
        for part in x.chunk(world.size):
            expected += 0.1 * model[0](part).mean(0) / world.size
    nn.functional.mse_loss(model(own(x)), own(y)).backward()
    torch.testing.assert_close(model[1].running_mean, expected)
    optimizer.step()
    assert_same_bits(model)
    model[1].eval()  # frozen statistics are constants: they must not drift by rounding
    before = model[1].running_var.clone()
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(own(x)), own(y)).backward()
        optimizer.step()
    assert torch.equal(before, model[1].running_var)
    assert_same_bits(model)


@ranks(2)
def test_local_buffers_on_request() -> None:
    fd.init()
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(buffers="local"))
    x, y = data(12)
    nn.functional.mse_loss(model(own(x)), own(y)).backward()
    check = fd.verify(model)
    failed = [c for c in check.checks if c.passed is False]
    assert [c.name for c in failed] == ["buffers"], str(check)
    assert "'1.running_mean' (and 1 more) differs on ranks 0 and 1" in failed[0].answer


@ranks(2)
def test_other_changing_buffers_take_rank_0s_bits_and_constants_do_not_travel() -> None:
    world = fd.init()

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)
            self.register_buffer("average", torch.zeros(3, dtype=torch.float64))
            self.register_buffer("table", torch.full((1000,), float("-inf")))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.linear(x)
            assert isinstance(self.average, torch.Tensor)
            with torch.no_grad():
                self.average.mul_(0.9).add_(out.mean(0).double(), alpha=0.1)
            return out

    model: Any = Counting()
    fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
    x, y = data(12)
    mine = torch.zeros(3, dtype=torch.float64)
    for _ in range(2):
        with torch.no_grad():
            if world.rank == 0:
                mine = mine * 0.9 + 0.1 * model.linear(own(x)).mean(0).double()
        nn.functional.mse_loss(model(own(x)), own(y)).backward()
    if world.rank == 0:
        assert torch.equal(model.average, mine)
    assert_same_bits(model)
    from farandole.parallel.apply import engine_of

    engine = engine_of(model)
    assert engine is not None
    assert engine._under_way._riders[0]._names == ["average"]  # type: ignore[attr-defined]
    assert_close(model, model)
