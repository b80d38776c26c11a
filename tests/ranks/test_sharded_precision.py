"""Plan keys ``precision`` and ``bf16_parameters`` where ranks have shards: ZeRO stages 1, 2, 3 and hybrid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import farandole as fd
from farandole.comm.world.store_sync import all_gather_json
from farandole.parallel.loss_scaling import BACKOFF, INITIAL
from farandole.train.verify.verify import fingerprint
from tests.ranks.pool import ranks
from tests.ranks.reference import data, own
from tests.ranks.sharded_cases import WIDTH, Block, full, require_close
from tests.ranks.test_precision import Autocast, plain_loss, scale_of
from tests.ranks.test_routes import TWO_HOSTS, pretend_two_hosts

SCALE = 4096.0
"""Where no gradient of `blocks` overflows."""


def blocks() -> nn.Sequential:
    """A model with repeated blocks, units of their own at stage 3."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, WIDTH), nn.Sequential(Block(), Block(), Block()), nn.Linear(WIDTH, 3))


def follow_autocast(keys: dict[str, Any]) -> None:
    """Train in float16 with shards, and in one process under autocast on the joined batch; compare both."""
    model, alone = blocks(), blocks()
    optimizer, plain = (torch.optim.SGD(each.parameters(), 0.05, momentum=0.9) for each in (model, alone))
    fd.distribute(model, optimizer, fd.Plan(precision="fp16", **keys))
    scale_of(model).value = SCALE
    passes = keys.get("accumulate", 1)
    for step in range(3):
        for number in range(passes):
            x, y = data(24, seed=10 * step + number)
            (plain_loss(model, own(x), own(y)) / passes).backward()
            (plain_loss(Autocast(alone, torch.float16), x, y) * SCALE / passes).backward()
        for parameter in alone.parameters():
            assert parameter.grad is not None, "a parameter of the reference is unused"
            parameter.grad /= SCALE
        if "clip_norm" in keys:
            torch.nn.utils.clip_grad_norm_(alone.parameters(), keys["clip_norm"])
        optimizer.step(), plain.step()
        optimizer.zero_grad(), plain.zero_grad()
    assert scale_of(model).skipped_steps == 0, "a step was skipped"
    require_close(model, alone, str(keys), 5e-3)


@pytest.mark.full("further")
@ranks(2, 3)
def test_float16_with_shards_trains_as_autocast_in_one_process() -> None:
    fd.init()
    for stage in (1, 2, 3):
        follow_autocast({"zero": stage, "accumulate": 2, "clip_norm": 0.05})
    follow_autocast({"zero": 3, "recompute": "blocks"})


@pytest.mark.full("further")
@ranks(4, **TWO_HOSTS)
def test_float16_with_hybrid_shards_trains_as_autocast_in_one_process() -> None:
    pretend_two_hosts()
    fd.init()
    follow_autocast({"zero": 3, "shard_within": "host", "accumulate": 2, "clip_norm": 0.05})


class Two(nn.Module):
    """Two parts, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """From (batch, 6) to twice (batch, 5)."""
        return self.first(x), self.second(x)


@pytest.mark.gate_cases("2")
@ranks(2, 3)
def test_what_one_rank_owns_overflows_and_all_skip_the_step() -> None:
    """The gradient of one row alone is infinite: the rank that owns it sees it, and the others do not."""
    fd.init()
    cases: list[dict[str, Any]] = [{"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 1, "weight_codec": "int8"}]
    for keys in cases:
        skip_together(keys)


def skip_together(keys: dict[str, Any]) -> None:
    world = fd.world()
    model = Two()
    optimizers = [torch.optim.Adam(each.parameters(), 0.01) for each in (model.first, model.second)]
    route: dict[str, Any] = {} if keys["zero"] == 3 else {"route": "flat"}
    fd.distribute(model, optimizers, fd.Plan(precision="fp16", clip_norm=1.0, **route, **keys))
    scale = scale_of(model)

    def step(factor: float) -> list[str]:
        before = full(model)
        before = {name: value.clone() for name, value in before.items()}
        first, second = model(own(data(12)[0]))
        weights = torch.ones(5)
        weights[4] = factor if world.rank == 0 else 1.0
        ((first * weights).mean() + second.mean()).backward()
        seen = [each.grad is not None for each in model.parameters()]
        for each in optimizers:
            each.step()
        assert seen == [each.grad is not None for each in model.parameters()], "the loop cannot see gradients"
        for each in optimizers:
            each.zero_grad()
        return [name for name, value in full(model).items() if not torch.equal(value, before[name])]

    both = ["first.weight", "first.bias", "second.weight", "second.bias"]
    assert step(1e6) == both[2:], "the first part stepped, or the second did not"
    assert (scale.value, scale.skipped_steps, scale.good_steps) == (INITIAL * BACKOFF, 1, 0), vars(scale)
    assert not optimizers[0].state, "an optimizer counted a step that was skipped"
    assert step(1.0) == both, "a step after a skipped one did not go through"
    assert (scale.value, scale.skipped_steps, scale.good_steps) == (INITIAL * BACKOFF, 1, 1), vars(scale)
    require_same_bits(model)


def require_same_bits(model: nn.Module) -> None:
    """Every rank holds the same bits of the whole parameters."""
    said = all_gather_json(fd.world(), "test/whole", {name: fingerprint(t) for name, t in full(model).items()})
    assert all(other == said[0] for other in said), f"ranks differ: {said}"


@ranks(2)
def test_a_scaler_of_the_script_beside_ours_is_refused_with_shards() -> None:
    fd.init()
    for stage in (1, 3):
        model = blocks()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        fd.distribute(model, optimizer, fd.Plan(zero=stage, precision="fp16"))
        x, y = data(8)
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        scaler.scale(plain_loss(model, own(x), own(y))).backward()
        with pytest.raises(fd.ConfigError, match="and so does a GradScaler of the script"):
            scaler.step(optimizer)


# -- parameters in bfloat16 ----------------------------------------------------------------------------

NARROW: dict[str, Any] = {"precision": "bf16", "bf16_parameters": True}


class Narrow:
    """A training with parameters in bfloat16."""

    def __init__(self, seed: int = 1, **keys: Any) -> None:
        self.passes, self.losses = int(keys.get("accumulate", 1)), list[Any]()
        self.model = blocks()
        for parameter in self.model.parameters():
            parameter.data += 0.01 * (seed - 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.01)
        fd.distribute(self.model, self.optimizer, fd.Plan(**{**NARROW, **keys}))

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.optimizer.zero_grad()
            for number in range(self.passes):
                x, y = data(24, seed=10 * step + number)
                loss = plain_loss(self.model, own(x), own(y)) / self.passes
                loss.backward()
            self.losses.append(fd.mean(loss.detach()))
            self.optimizer.step()

    def bits(self) -> dict[str, str]:
        states = {
            f"{name}/{key}": fingerprint(value.full_tensor() if isinstance(value, DTensor) else value)
            for name, each in named_states(self.model, self.optimizer).items()
            for key, value in each.items()
        }
        assert {str(v.dtype) for each in self.optimizer.state.values() for v in each.values()} == {"torch.float32"}
        return {**{name: fingerprint(value) for name, value in full(self.model).items()}, **states}


def named_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Return the states of an optimizer with one group, by name of the parameter."""
    names = [name for name, _ in model.named_parameters()]
    return {names[index]: each for index, each in optimizer.state_dict()["state"].items()}


@pytest.mark.full("further")
@ranks(2)
def test_bfloat16_parameters_have_the_same_bits_at_every_stage() -> None:
    """One pass a step on two ranks: then sums are equal, and so is what the optimizer computes."""
    fd.init()
    found = {}
    for stage in (0, 1, 2, 3):
        run = Narrow(zero=stage)
        run.train(0, 6)
        assert {each.dtype for each in run.model.parameters()} == {torch.bfloat16}, f"stage {stage}"
        require_same_bits(run.model)
        found[stage] = run.bits()
    for stage in (1, 2, 3):
        differing = sorted(name for name, bits in found[0].items() if found[stage][name] != bits)
        assert not differing, f"stage {stage} has other bits of {differing}"


@pytest.mark.full("further")
@ranks(2, 3)
def test_bfloat16_parameters_train_as_float32_with_shards() -> None:
    fd.init()
    for keys in ({"zero": 1, "clip_norm": 0.5}, {"zero": 2, "accumulate": 2}, {"zero": 3, "accumulate": 2}):
        run, wide = Narrow(**keys), Narrow(precision="fp32", bf16_parameters=False, **keys)
        for each in (run, wide):
            each.train(0, 8)
        require_same_bits(run.model)
        torch.testing.assert_close(run.losses, wide.losses, rtol=0.05, atol=0.02, msg=lambda m: f"{keys}: {m}")  # noqa: B023


@pytest.mark.full("further")
@pytest.mark.parametrize("stages", [(1, 3), (2, 0), (3, 1)])
@ranks(2)
def test_a_resumed_run_with_bfloat16_parameters_goes_on_bit_for_bit(
    stages: tuple[int, int], tmp_path: Any
) -> None:
    """At the same stage, and at another one."""
    fd.init()
    run = Narrow(zero=stages[0])
    run.train(0, 3)
    fd.save(tmp_path, run.model, run.optimizer, step=3)
    saved = run.bits()
    run.train(3, 5)
    for stage in stages:
        again = Narrow(seed=2, zero=stage)
        fd.load(tmp_path, again.model, again.optimizer)
        assert again.bits() == saved, f"stage {stage} has not loaded the same bits"
        again.train(3, 5)
        assert again.bits() == run.bits(), f"stage {stage} went another way"


@ranks(2)
def test_a_step_that_raises_leaves_bfloat16_parameters_and_norms_are_refused_where_they_cannot_be() -> None:
    fd.init()

    class Failing(torch.optim.SGD):
        fails = False

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise RuntimeError("no step today")
            return super().step(closure)

    x, y = data(8)
    for stage in (0, 1, 3):
        model = blocks()
        optimizer = Failing(model.parameters(), 0.1, momentum=0.9)
        fd.distribute(model, optimizer, fd.Plan(zero=stage, **NARROW))
        given = list(optimizer.param_groups[0]["params"])
        for fails in (False, True, False):
            before = {name: value.clone() for name, value in full(model).items()}
            optimizer.fails = fails
            optimizer.zero_grad()
            plain_loss(model, own(x), own(y)).backward()
            if fails:
                with pytest.raises(RuntimeError, match="no step today"):
                    optimizer.step()
            else:
                optimizer.step()
            held = optimizer.param_groups[0]["params"]
            assert all(one is other for one, other in zip(held, given, strict=True)), f"stage {stage}: the groups"
            assert set(map(id, optimizer.state)) <= set(map(id, given)), f"stage {stage}: states of others"
            assert {each.dtype for each in given} == {torch.bfloat16}, f"stage {stage}: a type has changed"
            same = all(torch.equal(value, before[name]) for name, value in full(model).items())
            assert same == fails, f"stage {stage}: parameters after a step, fails: {fails}"
        require_same_bits(model)
    for stage in (2, 3):
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        optimizer = Failing(model.parameters(), 0.1)
        plan = fd.Plan(zero=stage, **NARROW)
        if stage == 3:
            with pytest.raises(fd.ConfigError, match="running statistics in float32"):
                fd.distribute(model, optimizer, plan)
            continue
        fd.distribute(model, optimizer, plan)
        plain_loss(model, own(x), own(y)).backward()
        optimizer.step()
        require_same_bits(model)
        assert model[1].weight.dtype == torch.float32, "a normalisation became narrow"
