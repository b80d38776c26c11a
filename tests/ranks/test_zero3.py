"""ZeRO stage 3: sharded parameters train as one process does on the joined batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import farandole as fd
from farandole.comm.world.store_sync import all_gather_json
from farandole.core.vocabulary.spec import Plan
from farandole.train.verify.verify import fingerprint
from tests.ranks.pool import ranks, takes
from tests.ranks.reference import data, mlp, own
from tests.ranks.sharded_cases import CASES, OPTIMIZERS, Words, batches, check, full, loss_of
from tests.ranks.test_routes import TWO_HOSTS, pretend_two_hosts


@pytest.mark.full("further")
@ranks(2)
def test_five_steps_of_adam_are_those_of_one_process() -> None:
    fd.init()
    reference, model = mlp(), mlp()
    plain, optimizer = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (reference, model))
    names = list(model.state_dict())
    fd.distribute(model, optimizer, Plan(zero=3))
    assert list(model.state_dict()) == names, "the names stay"
    assert all(isinstance(each, DTensor) for each in model.parameters()), "parameters are sharded"
    x, y = data(8)
    for _ in range(5):
        expected = nn.functional.mse_loss(reference(x), y)
        plain.zero_grad(), expected.backward(), plain.step()
        loss = nn.functional.mse_loss(model(own(x)), own(y))
        optimizer.zero_grad(), loss.backward(), optimizer.step()
        torch.testing.assert_close(torch.tensor(fd.mean(loss)), expected.detach(), rtol=1e-5, atol=1e-7)
    for name, value in full(model).items():
        torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-5, atol=1e-6, msg=name)


class Residual(nn.Module):
    """Eight sequences in a list, called one after the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 6)) for _ in range(8)
        )
        self.head = nn.Linear(6, 3)
        self.whole: list[int] = []
        """Blocks that were whole while each one ran."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        found: torch.Tensor = self.head(x)
        return found

    def count_whole(self, *_: object) -> None:
        self.whole.append(sum(not any(isinstance(p, DTensor) for p in each.parameters()) for each in self.blocks))


def train_residual(**keys: Any) -> Residual:
    model = Residual()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    fd.distribute(model, optimizer, Plan(**keys))
    for block in model.blocks:
        block[2].register_forward_hook(model.count_whole)  # type: ignore[index]
    for seed in range(3):
        x, y = data(8, seed)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(own(x)), own(y)).backward()
        optimizer.step()
    return model


@ranks(2)
def test_sequences_in_a_list_are_gathered_one_by_one_and_recomputed_exactly() -> None:
    fd.init()
    plain, sharded, again = train_residual(), train_residual(zero=3), train_residual(zero=3, recompute="blocks")
    assert len(sharded.whole) == 3 * 8, f"one pass: {sharded.whole}"
    assert len(again.whole) == 2 * 3 * 8, f"forward passes and again in backward: {again.whole}"
    assert max(sharded.whole + again.whole) <= 2, f"the one that runs and the next: {sharded.whole} {again.whole}"
    expected, recomputed = plain.state_dict(), full(again)
    for name, value in full(sharded).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)
        assert torch.equal(value, recomputed[name]), f"{name}: other bits with recomputation"


@pytest.mark.full("further")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@ranks(2, 3, 4)
@takes(300)
def test_the_matrix(optimizer: str) -> None:
    fd.init()
    for case in CASES:
        check(case, OPTIMIZERS[optimizer], "world")


@pytest.mark.full("slow")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@ranks(4, **TWO_HOSTS)
@takes(300)
def test_hybrid(optimizer: str) -> None:
    pretend_two_hosts()
    fd.init()
    for case in CASES:
        check(case, OPTIMIZERS[optimizer], "host")


@pytest.mark.full("further")
@pytest.mark.parametrize(
    "keys",
    [
        {"codec": "int8"},
        {"codec": "fp16"},
        {"codec": "bf16"},
        {"codec": "int8:feedback=false"},
        {"codec": "int8:rounding=stochastic"},
        {"weight_codec": "int8"},
        {"codec": "int8", "weight_codec": "int8", "accumulate": 2},
    ],
)
@ranks(2, 3)
def test_packed_gradients_and_parameters_train_nearly_as_well(keys: dict[str, object]) -> None:
    fd.init()
    reference, model = Words(), Words()
    plain, optimizer = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (reference, model))
    fd.distribute(model, optimizer, Plan.from_mapping({"zero": 3, **keys}, where="test"))
    for x, y in batches(1) * 30:
        for each in (plain, optimizer):
            each.zero_grad()
        expected = loss_of(reference, x, y)
        expected.backward()
        loss = loss_of(model, own(x), own(y))
        loss.backward()
        plain.step(), optimizer.step()
    mean = float(fd.mean(loss.detach()))
    assert mean != expected.item(), "something is rounded"
    assert abs(mean - expected.item()) < 0.02 * expected.item(), f"{mean}, one process {expected.item()}"
    prints = all_gather_json(fd.world(), "test/full", {n: fingerprint(t) for n, t in full(model).items()})
    assert all(each == prints[0] for each in prints), "ranks differ"


@pytest.mark.gate_cases("3")
@ranks(2, 3)
def test_a_packed_gradient_is_the_mean_in_every_unit() -> None:
    """Not its multiple: Adam and a glance at the loss would not tell."""
    fd.init()
    for codec in ("int8", "int8:feedback=false", "fp16", "bf16"):
        _compare_first_gradients({"zero": 3, "codec": codec})


@ranks(4)
def test_a_packed_gradient_is_the_mean_over_copies_of_shards_too() -> None:
    fd.init()
    for codec in ("none", "int8", "bf16"):
        _compare_first_gradients({"zero": 3, "data": 2, "shard": 2, "codec": codec})


def _compare_first_gradients(keys: dict[str, object]) -> None:
    reference, model = Words(), Words()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fd.distribute(model, optimizer, Plan.from_mapping(keys, where="test"))
    ((x, y),) = batches(1)
    loss_of(reference, x, y).backward()
    loss_of(model, own(x), own(y)).backward()
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(mine.grad, DTensor)
        assert theirs.grad is not None
        off = (mine.grad.full_tensor() - theirs.grad).norm() / theirs.grad.norm()
        assert off < 0.1, f"{keys}: {name} is off by {off:.3f}"


@pytest.mark.gate_cases("raise")
@pytest.mark.parametrize("nonfinite", ["propagate", "skip", "raise"])
@ranks(2)
def test_a_packed_gradient_with_nan_is_treated_alike_on_all_ranks(nonfinite: str) -> None:
    world = fd.init()
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fd.distribute(
        model, optimizer, Plan.from_mapping({"zero": 3, "codec": "int8", "nonfinite": nonfinite}, where="t")
    )
    (x, y), (a, b) = batches(2)
    loss_of(model, own(x), own(y)).backward()
    optimizer.step()
    before = full(model)
    optimizer.zero_grad()
    loss = loss_of(model, own(a), own(b)) * (float("nan") if world.rank == 1 else 1.0)
    if nonfinite == "raise":
        with pytest.raises(fd.CommError, match="of 2 ranks"):
            loss.backward()
    elif nonfinite == "skip" and world.rank == 0:
        with pytest.warns(RuntimeWarning, match="step skipped"):
            loss.backward()
    else:
        loss.backward()
    optimizer.step()
    now = full(model)
    is_nan = any(bool(torch.isnan(each).any()) for each in now.values())
    assert is_nan == (nonfinite == "propagate"), "what became of it"
    if nonfinite != "propagate":
        assert all(torch.equal(now[name], before[name]) for name in now), "nothing was used"
        optimizer.zero_grad()
        loss_of(model, own(a), own(b)).backward()
        optimizer.step()
        assert all(bool(torch.isfinite(each).all()) for each in full(model).values()), "no residual kept it"


@ranks(2)
def test_a_grad_scaler_with_residuals_is_refused() -> None:
    fd.init()
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fd.distribute(model, optimizer, Plan(zero=3, codec="int8"))
    scaler = torch.amp.GradScaler("cpu")
    ((x, y),) = batches(1)
    scaler.scale(loss_of(model, own(x), own(y))).backward()
    with pytest.raises(fd.ConfigError, match="GradScaler changes their scale"):
        scaler.step(optimizer)
