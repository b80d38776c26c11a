"""Frozen weights, states on disk and schedules on several ranks: as one process, and the same bits on all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.core.vocabulary.errors import Mismatch, PlanError
from farandole.parallel.frozen_weight import FrozenWeight
from farandole.parallel.optim import disk_states
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_close, assert_same_bits, data, mlp, own, train_alone


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
    train_alone(model, optimizer, [(own(x), own(y)) for x, y in batches])


BATCHES = [data(12, seed) for seed in range(6)]


def with_adapters(seed: int) -> nn.Sequential:
    model = mlp(seed)
    model.requires_grad_(False)
    fd.low_rank_adapters(model, "*", rank=2)
    return model


@pytest.mark.gate_cases("int4")
@pytest.mark.parametrize("codec", ["int8", "int4"])
@ranks(2)
def test_frozen_weights_are_rank_0_s_and_adapters_train_as_in_one_process(codec: Any) -> None:
    world = fd.init()
    model = with_adapters(seed=1 + world.rank)
    trained = [each for each in model.parameters() if each.requires_grad]
    fd.distribute(model, optimizer := torch.optim.Adam(trained, 0.01), fd.Plan(frozen_codec=codec))
    weight = model[0].weight
    assert isinstance(weight, FrozenWeight)
    reference = FrozenWeight.encode(with_adapters(seed=1)[0].get_parameter("weight"), codec)
    assert torch.equal(weight.packed, reference.packed), "what rank 0 had"
    assert torch.equal(weight.scales, reference.scales), "and its scales"
    alone = with_adapters(seed=1)
    plain = {n: v.decode() if isinstance(v, FrozenWeight) else v.clone() for n, v in model.state_dict().items()}
    alone.load_state_dict(plain)
    train_alone(
        alone, torch.optim.Adam([each for each in alone.parameters() if each.requires_grad], 0.01), BATCHES
    )
    train(model, optimizer, BATCHES)
    for name, each in alone.named_parameters():
        if each.requires_grad:
            torch.testing.assert_close(model.get_parameter(name), each, rtol=1e-4, atol=1e-5, msg=name)
    assert_same_bits(model)


@pytest.mark.full("further")
@ranks(2)
def test_a_frozen_weight_that_one_rank_cannot_store_is_refused_on_both() -> None:
    world = fd.init()
    model = with_adapters(seed=1)
    if world.rank == 1:
        model[2].get_parameter("weight").data[0, 0] = float("inf")
    with pytest.raises(PlanError, match=r"'2.weight' holds NaN or infinity"):
        fd.distribute(model, torch.optim.SGD(model[0].parameters(), 0.1), fd.Plan(frozen_codec="int8"))


@ranks(2)
def test_states_on_disk_train_as_in_one_process() -> None:
    world = fd.init()
    plan = fd.Plan(offload="disk", clip_norm=0.5, codec="int8")
    jobs = []
    for each in (plan, fd.Plan(clip_norm=0.5, codec="int8")):
        model = mlp(1 + world.rank)
        jobs.append(fd.distribute(model, torch.optim.Adam(model.parameters(), 0.01), each))
        train(*jobs[-1], BATCHES)
    for one, two in zip(jobs[0][0].parameters(), jobs[1][0].parameters(), strict=True):
        assert torch.equal(one, two), "the same bits as with states in memory"
    assert_same_bits(jobs[0][0])
    model = mlp(1)
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(disk_states, "why_unusable", lambda path: f"{path} is no directory")
        with pytest.raises(PlanError, match=r"rank 1: /var/tmp is no directory"):
            fd.distribute(model, torch.optim.Adam(model.parameters()), plan)


@pytest.mark.gate_cases("int8")
@pytest.mark.parametrize("codec", ["none", "int8"])
@ranks(2)
def test_a_schedule_trains_as_one_process_that_freezes(codec: str) -> None:
    fd.init()
    schedule = {"0": "0.*", "2": "0.* 2.*", "4": "2.* 4.*"}
    model = mlp(1)
    fd.distribute(model, optimizer := torch.optim.SGD(model.parameters(), 0.1, momentum=0.5),
                  fd.Plan(train_schedule=schedule, codec=codec, bucket_bytes=256))  # fmt: skip
    alone = mlp(1)
    by_hand = torch.optim.SGD(alone.parameters(), 0.1, momentum=0.5)
    now: tuple[str, ...] = ()
    for number, batch in enumerate(BATCHES):
        now = {0: ("0",), 2: ("0", "2"), 4: ("2", "4")}.get(number, now)
        for name, each in alone.named_parameters():
            each.requires_grad_(name[0] in now)
        train_alone(alone, by_hand, [batch])
        train(model, optimizer, [batch])
        assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in alone.parameters()] or (
            number + 1 in (2, 4)
        ), f"after step {number + 1}"
    if codec == "none":
        assert_close(model, alone)
    assert_same_bits(model)


@ranks(2)
def test_plans_that_differ_are_refused_before_anything_changes() -> None:
    world = fd.init()
    model = mlp(1)
    schedule = {"0": "0.*"} if world.rank else {"0": "*"}
    with pytest.raises(Mismatch, match="train_schedule"):
        fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(train_schedule=schedule))
    assert all(each.requires_grad for each in model.parameters()), "nothing was frozen"
