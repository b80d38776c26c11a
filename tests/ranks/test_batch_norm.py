"""BatchNorm, plain and synchronised, and other buffers that change."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import farandole as fd
from farandole.parallel.distribute import undistribute
from farandole.parallel.model import DistributedModel
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_close, assert_same_bits, data, own, train_alone


def convolutional() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8),
        nn.BatchNorm1d(8, affine=False), nn.Linear(8, 3, bias=False), nn.BatchNorm1d(3, momentum=None),
    )  # fmt: skip


def images(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = data(count, width=32)
    return x.view(count, 2, 4, 4), y


Trained = tuple[nn.Module, torch.optim.Optimizer]


def train_both(distributed: Trained, alone: Trained, count: int, *, batch_size: int) -> None:
    """Train an epoch on `count` images: each rank with its share of every batch, and as one process does."""
    rows = TensorDataset(*images(count))
    train_alone(*alone, DataLoader(rows, batch_size=batch_size))
    train_alone(*distributed, fd.shard(DataLoader(rows, batch_size=batch_size), split=True))


def assert_both_alike(model: nn.Module, reference: nn.Module) -> None:
    """Weights, buffers and what they compute in evaluation are equal to float rounding."""
    assert_close(model, reference, rtol=1e-4, atol=1e-5)
    assert_same_bits(model)
    x, _ = images(5)
    torch.testing.assert_close(model.eval()(x), reference.eval()(x), rtol=1e-4, atol=1e-5)


@ranks(2)
def test_statistics_are_this_ranks_own_when_the_plan_is_undone() -> None:
    rank = fd.init().rank
    model, plain = convolutional(), convolutional()
    fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(sync_batch_norm=True))
    undistribute(model)
    plain.load_state_dict(model.state_dict())
    if rank == 0:  # alone: nothing is exchanged any more
        x, _ = images(6)
        torch.testing.assert_close(model(x), plain(x), rtol=0.0, atol=0.0)
    assert list(map(type, model)) == list(map(type, plain))


@pytest.mark.full("further")
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
    for _ in range(3):
        train_both((model, optimizer), (reference, other), count, batch_size=6)
    assert_both_alike(model, reference)


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

    reducer = DistributedModel.of(model).reducer
    assert reducer is not None
    assert next(iter(reducer.in_flight._extra))._names == ["average"]  # type: ignore[attr-defined]
    assert_close(model, model)


class ActivatedNorm(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: a forward of its own that asks torch's function."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.activation = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.num_batches_tracked is not None
        if self.training:
            self.num_batches_tracked.add_(1)
        out = nn.functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias,
            self.training or self.running_mean is None, self.momentum or 0.0, self.eps,
        )  # fmt: skip
        activated: torch.Tensor = self.activation(out)
        return activated


class Named(nn.BatchNorm2d):
    """Changes nothing that is computed."""


class CallsSuper(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 2) + 1


class OwnFormula(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean((0, 2, 3), keepdim=True)


def with_subclasses() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), ActivatedNorm(4), nn.Conv2d(4, 4, 3, padding=1), Named(4), CallsSuper(4),
        nn.Conv2d(4, 4, 3), nn.SyncBatchNorm(4), nn.InstanceNorm2d(4), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


@ranks(2)
def test_subclasses_of_batch_norm_are_synchronised() -> None:
    fd.init()
    model, reference = with_subclasses(), with_subclasses()
    plain = nn.BatchNorm2d(4)  # torch's SyncBatchNorm refuses a processor's tensors
    plain.load_state_dict(reference[6].state_dict())
    reference[6] = plain
    kinds = [type(module).__name__ for module in model]
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    fd.distribute(model, optimizer, fd.Plan(sync_batch_norm=True))
    assert isinstance(model[1], ActivatedNorm)
    assert [type(module).__name__ for module in model] == kinds
    other = torch.optim.SGD(reference.parameters(), 0.05)
    train_both((model, optimizer), (reference, other), 11, batch_size=4)
    assert_both_alike(model, reference)


@ranks(2)
def test_a_subclass_that_computes_by_itself_is_refused_by_name() -> None:
    fd.init()
    model = nn.Sequential(nn.BatchNorm2d(2), nn.Conv2d(2, 4, 3), OwnFormula(4), nn.Flatten(), nn.Linear(16, 3))
    fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(sync_batch_norm=True))
    x, _ = images(4)
    with pytest.raises(
        fd.ConfigError, match=r"1 of 2 BatchNorm layers .* cannot be synchronised: .* of OwnFormula"
    ):
        model(x)


@pytest.mark.parametrize("synchronised", [True, False])
@ranks(2)
def test_copies_normalise_and_train_by_themselves(synchronised: bool) -> None:
    world = fd.init()
    model: Any = nn.Sequential(
        nn.Conv2d(2, 4, 3), ActivatedNorm(4), nn.Flatten(), nn.Linear(16, 3), nn.BatchNorm1d(3)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fd.distribute(model, optimizer, fd.Plan(sync_batch_norm=synchronised))
    x, y = images(8)
    nn.functional.mse_loss(model(own(x)), own(y)).backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    for twin in (*copies, averaged.module):
        assert type(twin[4]) is nn.BatchNorm1d
        assert type(twin[1]) is ActivatedNorm
    for twin in copies:
        stepper = torch.optim.SGD(twin.parameters(), 0.1)
        if world.rank == 0:  # alone: nobody is waited for
            before = copy.deepcopy(twin.state_dict())
            nn.functional.mse_loss(twin(x), y).backward()
            stepper.step()
            assert not torch.equal(before["3.weight"], twin.state_dict()["3.weight"])
    assert_same_bits(model)
    twin = copies[0]
    again = torch.optim.SGD(twin.parameters(), 0.1)
    fd.distribute(twin, again, fd.Plan(sync_batch_norm=synchronised))  # a copy may become one of its own
    nn.functional.mse_loss(twin(own(x)), own(y)).backward()
    again.step()
    assert_same_bits(twin)
    both = copy.deepcopy((model, optimizer))
    if world.rank == 0:
        nn.functional.mse_loss(both[0](x), y).backward()
        both[1].step()
    pickle.dumps(optimizer)
    assert_same_bits(model)
