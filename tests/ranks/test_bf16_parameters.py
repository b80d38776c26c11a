"""Plan key ``bf16_parameters``: parameters and gradients in bfloat16, updates rounded stochastically."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.core.vocabulary.errors import ConfigError, PlanError
from farandole.parallel.distribute import undistribute
from farandole.parallel.optim import bf16_parameters
from farandole.parallel.optim.bf16_parameters import round_stochastically, seed_of
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_same_bits, data, mlp, own

PLAN = fd.Plan(precision="bf16", bf16_parameters=True)


def test_the_mean_of_many_roundings_is_the_value() -> None:
    values = torch.tensor([1.0 + 2**-9, -3.14159, 1e-3, 65504.0, 0.0, 1e-40])
    count = 4096
    total = torch.zeros(6, dtype=torch.float64)
    for step in range(count):
        total += round_stochastically(values, seed_of(step, 3)).double()
    distance = 2.0**-7 * values.abs().double() + 1e-40  # of two neighbours, at most
    error = (total / count - values.double()).abs()
    assert bool((error <= 4 * distance / count**0.5).all()), f"biased by {error}"


def test_each_value_becomes_a_neighbour_and_what_is_not_finite_stays() -> None:
    torch.manual_seed(0)
    values = torch.randn(10000)
    rounded = round_stochastically(values, 1).float()
    low = values.view(torch.int32).bitwise_and(-0x10000).view(torch.float32)
    high = (values.view(torch.int32).bitwise_and(-0x10000) + 0x10000).view(torch.float32)
    assert bool(((rounded == low) | (rounded == high)).all()), "a value went further than to its neighbours"
    assert abs(float((rounded == high).float().mean()) - 0.5) < 0.03, "the noise leans to one side"
    assert not torch.equal(rounded, round_stochastically(values, 2).float()), "another seed makes no other noise"
    exact = values.bfloat16().float()
    assert torch.equal(round_stochastically(exact, 5).float(), exact), "what bfloat16 holds has changed"
    strange = torch.tensor([float("inf"), -float("inf"), float("nan")])
    kept = round_stochastically(strange, 9)
    assert torch.equal(kept[:2].float(), strange[:2]), kept
    assert bool(kept[2].isnan()), kept


@pytest.mark.gate_cases("1")
@ranks(1, 2)
def test_an_update_that_bfloat16_would_lose_makes_progress() -> None:
    """1000 steps of -1e-4 each, of a weight of 1: the next smaller bfloat16 number is 4e-3 away."""
    fd.init()
    model = nn.Linear(64, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    fd.distribute(model, optimizer, PLAN)
    for _ in range(1000):
        optimizer.zero_grad()
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
    assert model.weight.dtype == torch.bfloat16, model.weight.dtype
    mean = float(model.weight.detach().float().mean())
    assert abs(mean - 0.9) < 0.01, f"the mean weight is {mean}"
    assert_same_bits(model)


@pytest.mark.gate_cases("1-keys3")
@pytest.mark.parametrize("keys", [{}, {"codec": "int8"}, {"clip_norm": 0.5}, {"accumulate": 2}])
@ranks(1, 2)
def test_training_follows_float32(keys: dict[str, Any]) -> None:
    fd.init()
    losses: dict[bool, list[float]] = {}
    for narrow in (False, True):
        model = mlp()
        model.append(nn.BatchNorm1d(3))
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        fd.distribute(model, optimizer, fd.Plan(**keys, precision="bf16", bf16_parameters=narrow))
        losses[narrow] = []
        for step in range(16):
            x, y = data(16, seed=step % 3)
            loss = nn.functional.mse_loss(model(own(x)), own(y))
            loss.backward()
            losses[narrow].append(float(loss.detach()))
            if step % keys.get("accumulate", 1) == keys.get("accumulate", 1) - 1:
                optimizer.step()
                optimizer.zero_grad()
        assert_same_bits(model)
        wide = {name for name, each in model.named_parameters() if each.dtype == torch.float32}
        assert not narrow or wide == {"5.weight", "5.bias"}, f"in float32: {wide}"
        states = {value.dtype for state in optimizer.state.values() for value in state.values()}
        assert states == {torch.float32}, f"states in {states}"
    torch.testing.assert_close(losses[True], losses[False], rtol=0.05, atol=0.02)


@ranks(1)
def test_a_step_in_parts_is_the_step() -> None:
    fd.init()
    found = []
    for elements in (1 << 24, 1):
        bf16_parameters._PART_ELEMENTS = elements
        model = mlp()
        groups: list[dict[str, Any]] = [
            {"params": list(model[0].parameters())}, {"params": list(model[2:].parameters()), "lr": 0.1},
        ]  # fmt: skip
        optimizer = torch.optim.Adam(groups)
        fd.distribute(model, optimizer, PLAN)
        x, y = data(8)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        assert [len(group["params"]) for group in optimizer.param_groups] == [2, 4], "groups have changed"
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    bf16_parameters._PART_ELEMENTS = 1 << 24
    assert all(map(torch.equal, *found)), "a step in parts gives other parameters"


@pytest.mark.gate_cases("1")
@ranks(1, 2)
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Any) -> None:
    fd.init()

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp()
        return fd.distribute(model, torch.optim.Adam(model.parameters(), 0.01), PLAN)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        x, y = data(8)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(own(x)), own(y)).backward()
            optimizer.step()

    model, optimizer = fresh()
    train(model, optimizer)
    fd.save(tmp_path, model, optimizer, step=3)
    train(model, optimizer)
    again, other = fresh()
    assert fd.load(tmp_path, again, other) == 3, "no step was loaded"
    train(again, other)
    for mine, expected in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, expected), "the resumed run went another way"


@ranks(1)
def test_what_is_refused_and_undone() -> None:
    fd.init()
    with pytest.raises(PlanError, match="bf16_parameters = true with precision"):
        fd.Plan(bf16_parameters=True)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fd.distribute(model, optimizer, PLAN)
    with pytest.raises(ConfigError, match="evaluates the model, by a closure"):
        optimizer.step(lambda: 0.0)
    undistribute(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}, "undistribute left bfloat16"
    wide = nn.Linear(2, 2).double()
    with pytest.raises(PlanError, match="has no effect"):
        fd.distribute(wide, torch.optim.SGD(wide.parameters(), 0.1), PLAN)
