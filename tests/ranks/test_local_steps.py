"""The plan's `sync`: ranks that train on their own, beside a simulation of all of them in one process."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, TensorDataset

import farandole as fd
from farandole.comm.world.store_sync import all_gather_json
from farandole.core.step_model import LocalPrediction
from farandole.core.vocabulary.errors import CommError, ConfigError, Mismatch, PlanError
from farandole.core.vocabulary.events import Exchange
from farandole.core.vocabulary.sync_spec import SyncSpec
from farandole.parallel.model import DistributedModel
from farandole.sync.local_steps import TIMED_STEPS, LocalSteps, MeasuredSync
from farandole.train.tuner import why_not
from tests.ranks import sync_loop
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_close, assert_same_bits, data, mlp
from tests.ranks.sync_loop import OPTIMIZERS, WHOLE, distributed, train

STEPS = 23


def batches(steps: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return sync_loop.batches(steps)


def local_steps(model: nn.Module) -> LocalSteps:
    policy = DistributedModel.of(model).policy
    assert isinstance(policy, LocalSteps)
    return policy


class Replicas:
    """All ranks in one process, by the papers' rule: one element of each list a rank."""

    def __init__(self, sync: str, kind: str, size: int, fragments: list[list[str]]) -> None:
        self.spec = SyncSpec.parse(sync)
        self.models = [mlp().double() for _ in range(size)]
        self.optimizers = [OPTIMIZERS[kind](each.parameters()) for each in self.models]
        self.outer = {name: each.detach().clone() for name, each in self.models[0].named_parameters()}
        self.velocity = {name: torch.zeros_like(each) for name, each in self.outer.items()}
        self.fragments = fragments
        self.sent: dict[int, tuple[int, list[dict[str, torch.Tensor]]]] = {}
        self.step = 0

    def run(self, joined: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for x, y in joined:
            parts = zip(x.chunk(len(self.models)), y.chunk(len(self.models)), strict=True)
            for model, optimizer, (xs, ys) in zip(self.models, self.optimizers, parts, strict=True):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(xs), ys).backward()
                optimizer.step()
            self.step += 1
            self.meet()

    @torch.no_grad()
    def meet(self) -> None:
        spec = self.spec
        for part, (at, _) in list(self.sent.items()):
            if self.step - at >= spec.overlap:
                self.apply(part)
        for part, names in enumerate(self.fragments):
            if self.step % spec.steps == ((part + 1) * (spec.steps // spec.fragments)) % spec.steps:
                self.sent[part] = (
                    self.step,
                    [
                        {name: model.get_parameter(name).detach().clone() for name in names}
                        for model in self.models
                    ],
                )
                if not spec.overlap:
                    self.apply(part)

    def apply(self, part: int) -> None:
        at, sent = self.sent.pop(part)
        for name in self.fragments[part]:
            change = torch.stack([self.outer[name] - each[name] for each in sent]).mean(0)
            self.velocity[name] = self.spec.momentum * self.velocity[name] + change
            step = change + self.spec.momentum * self.velocity[name] if self.spec.nesterov else self.velocity[name]
            self.outer[name] = self.outer[name] - self.spec.outer_lr * step
            for model, own in zip(self.models, sent, strict=True):
                now = model.get_parameter(name)
                now.copy_(now + self.outer[name] - own[name] if at < self.step else self.outer[name])


@pytest.mark.gate_cases(
    "2-local:H=4-sgd",
    "2-diloco:H=3,nesterov=false-adagrad",
    "2-diloco:H=6,fragments=3,overlap=1-adagrad",
    "2-local:H=4,overlap=2-adamw",
    "3-diloco:H=5-sgd",
    "3-local:H=6,fragments=3-adamw",
    "3-diloco:H=4,fragments=2,overlap=3-adamw",
)
@pytest.mark.parametrize("kind", ["sgd", "adamw", "adagrad"])
@pytest.mark.parametrize(
    "sync",
    [
        "local:H=4",
        "diloco:H=5",
        "diloco:H=3,nesterov=false",
        "local:H=6,fragments=3",
        "local:H=4,overlap=2",
        "diloco:H=6,fragments=3,overlap=1",
        "diloco:H=4,fragments=2,overlap=3",
    ],
)
@ranks(2, 3)
def test_each_rank_trains_as_in_one_process_that_has_all(sync: str, kind: str) -> None:
    world = fd.init()
    model, optimizer = distributed(sync, kind)
    fragments = [list(each.parameters) for each in local_steps(model).meetings.fragments]
    reference = Replicas(sync, kind, world.size, fragments)
    train(model, optimizer, batches())
    reference.run(batches())
    assert_close(model, reference.models[world.rank], rtol=1e-10, atol=1e-12)
    with fd.averaged(model):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.detach(), reference.outer[name], rtol=1e-10, atol=1e-12)


@pytest.mark.full_cases("2-sgd-0", "2-plain-1", "2-plain-5")
@pytest.mark.parametrize(("kind", "rest"), [("sgd", 0), ("plain", 1), ("plain", 5)])
@ranks(2, 3)
def test_meeting_after_each_step_is_every_step_for_sgd(kind: str, rest: int) -> None:
    """With momentum and weight decay, too: both are linear. `rest`: samples of the last batch, for all ranks.

    Where batches are uneven ranks weigh otherwise than in the steps that their momentum is of.
    """
    world = fd.init()
    x, y = (each.double() for each in data(WHOLE * 5 + rest))
    loader = fd.shard(DataLoader(TensorDataset(x, y), batch_size=WHOLE // world.size))
    model, optimizer = distributed("local:H=1", kind)
    reference = mlp().double()
    plain = OPTIMIZERS[kind](reference.parameters())
    for _ in range(2):
        for each, by, loop in (
            (model, optimizer, loader),
            (reference, plain, DataLoader(TensorDataset(x, y), batch_size=WHOLE)),
        ):
            for xs, ys in loop:
                nn.functional.mse_loss(each(xs), ys).backward()
                by.step()
                by.zero_grad()
    assert_close(model, reference, rtol=1e-10, atol=1e-12)
    assert_same_bits(model)


@ranks(3)
def test_a_placeholder_trains_nothing_and_weighs_nothing() -> None:
    """Seven samples in two batches: in the second one rank has a sample, and two have a copy of another's."""
    world = fd.init()
    x, y = (each.double() for each in data(7))
    loader = fd.shard(DataLoader(TensorDataset(x, y), batch_size=2))
    model, optimizer = distributed("local:H=2")
    alone = mlp().double()
    plain = OPTIMIZERS["sgd"](alone.parameters())
    weight = 0.0
    for xs, ys in loader:
        factor = world.session.batch_weight.factor
        weight += factor
        nn.functional.mse_loss(model(xs), ys).backward()
        optimizer.step()
        optimizer.zero_grad()
        if factor:
            nn.functional.mse_loss(alone(xs), ys).backward()
            plain.step()
            plain.zero_grad()
    assert all_gather_json(world, "test/weights", weight) == [4.0, 1.0, 1.0]
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        mean = other.detach() * weight / 6
        dist.all_reduce(mean)
        torch.testing.assert_close(mine.detach(), mean, rtol=1e-10, atol=1e-12)


@pytest.mark.full_cases("3-local:H=7", "2-local:H=6,fragments=2,overlap=3")
@pytest.mark.parametrize("sync", ["local:H=7", "local:H=6,fragments=2,overlap=3"])
@ranks(2, 3)
def test_on_equal_quadratics_the_mean_goes_as_every_step(sync: str) -> None:
    """Dynamics are linear and alike: whatever H and overlap, the mean of the ranks is that of every step."""
    world = fd.init()
    draw = torch.Generator().manual_seed(5)
    curvature = torch.randn(6, 6, generator=draw, dtype=torch.float64)
    curvature = curvature @ curvature.T / 6
    centres = torch.randn(world.size, 6, generator=draw, dtype=torch.float64)

    def loss(model: nn.Module, centre: torch.Tensor) -> torch.Tensor:
        gap = model.get_parameter("weight").reshape(-1) - centre
        return gap @ curvature @ gap / 2

    model, mean = (nn.Linear(6, 1, bias=False).double() for _ in range(2))
    second = nn.Linear(6, 1, bias=False).double()
    torch.manual_seed(2)
    for each in (model, second, mean):
        nn.init.constant_(each.weight, 0.7)
    both = nn.ModuleList([model, second]) if "fragments" in sync else nn.ModuleList([model])
    optimizer = torch.optim.SGD(both.parameters(), 0.1, momentum=0.8)
    fd.distribute(both, optimizer, fd.Plan(sync=sync))
    plain = torch.optim.SGD(mean.parameters(), 0.1, momentum=0.8)
    for _ in range(20):
        optimizer.zero_grad()
        sum(loss(each, centres[world.rank]) for each in both).backward()  # type: ignore[union-attr]
        optimizer.step()
        plain.zero_grad()
        loss(mean, centres.mean(0)).backward()
        plain.step()
        together = model.weight.detach().clone()
        dist.all_reduce(together)
        torch.testing.assert_close(together / world.size, mean.weight.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("sync", "first"), [("local:H=5", 0), ("post_local:H=5,first=4", 4)])
@ranks(2)
def test_ranks_are_equal_at_meetings_and_nothing_is_sent_between(
    sync: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = fd.init()
    model, optimizer = distributed(sync)
    calls: list[str] = []
    for name in ("all_reduce", "all_gather", "broadcast", "all_to_all_single", "isend", "irecv"):
        original = getattr(dist, name)

        def counted(*args: Any, name: str = name, original: Any = original, **named: Any) -> Any:
            calls.append(name)
            return original(*args, **named)

        monkeypatch.setattr(dist, name, counted)
    alike: list[int] = []
    spoken: list[int] = []

    def look(step: int) -> None:
        if calls:
            spoken.append(step)
        digests = all_gather_json(world, "test/digest", [float(p.detach().sum()) for p in model.parameters()])
        if digests[0] == digests[1]:
            alike.append(step)
        calls.clear()

    train(model, optimizer, batches(20), look)
    meetings = [step for step in range(1, 21) if step > first and (step - first) % 5 == 0]
    assert alike == [*range(1, first + 1), *meetings]
    assert [step for step in spoken if step > first] == meetings
    assert (DistributedModel.of(model).reducer is None) == (first == 0 or world.size > 0)


@ranks(2)
def test_the_first_steps_are_those_of_every_step_to_the_bit() -> None:
    fd.init()
    every, local = distributed("every_step"), distributed("post_local:H=9,first=6")
    for model, optimizer in (every, local):
        train(model, optimizer, batches(6))
    for a, b in zip(every[0].parameters(), local[0].parameters(), strict=True):
        assert torch.equal(a, b)
    assert local_steps(local[0]).is_local
    train(*local, batches(3))
    with pytest.raises(AssertionError):
        assert_same_bits(local[0])


@ranks(1)
def test_one_rank_is_as_without_a_policy_unless_the_outer_step_has_a_rate() -> None:
    fd.init()
    plain, local, ahead = distributed("every_step"), distributed("local:H=3"), distributed("diloco:H=3")
    for model, optimizer in (plain, local, ahead):
        train(model, optimizer, batches(9))
    assert all(torch.equal(a, b) for a, b in zip(plain[0].parameters(), local[0].parameters(), strict=True))
    reference = Replicas("diloco:H=3", "sgd", 1, [list(local_steps(ahead[0]).meetings.fragments[0].parameters)])
    reference.run(batches(9))
    assert_close(ahead[0], reference.models[0], rtol=1e-10, atol=1e-12)


def language_model() -> nn.Sequential:
    """Return a model with matrices that codecs take, in float32."""
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 3))


@pytest.mark.gate_cases("diloco:H=3-powersgd:2", "diloco:H=3-topk:0.1", "streaming:H=6,fragments=3,overlap=2-int4")
@pytest.mark.parametrize("codec", ["int8", "int4", "powersgd:2", "topk:0.1", "bf16"])
@pytest.mark.parametrize("sync", ["diloco:H=3", "streaming:H=6,fragments=3,overlap=2"])
@ranks(2)
def test_changes_travel_by_a_codec_whose_rest_is_sent_later(sync: str, codec: str) -> None:
    """Of all that ranks asked for, what was applied and what is kept are the whole (in float64)."""
    world = fd.init()
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    fd.distribute(model, optimizer, fd.Plan(sync=sync, codec=codec))
    policy = local_steps(model)
    asked: dict[str, torch.Tensor] = {}
    applied: dict[str, torch.Tensor] = {}
    exchange = policy.meetings._exchange.mean

    def mean(changes: Any, meeting: Any) -> Any:
        found = exchange(changes, meeting)
        assert found is not None
        for name in changes:
            own = changes[name].double() / world.size
            asked[name] = asked.get(name, torch.zeros_like(own)) + own
            applied[name] = applied.get(name, torch.zeros_like(own)) + found[name].double()
        return found

    policy.meetings._exchange.mean = mean  # type: ignore[method-assign]
    joined = [(x.float(), y.float()) for x, y in batches(20)]
    train(model, optimizer, joined)
    fd.drain(model)
    assert_same_bits(model)
    kept = policy.meetings._exchange.state()
    assert "2.weight" in kept
    for name, total in asked.items():
        rest = (
            kept[name]["elements"]["residual"].double() / world.size if name in kept else torch.zeros_like(total)
        )
        for each in (total, rest):
            dist.all_reduce(each)
        torch.testing.assert_close(applied[name] + rest, total, rtol=1e-4, atol=1e-5)


@ranks(2)
def test_averaged_parameters_come_and_go_to_the_bit() -> None:
    fd.init()
    model, optimizer = distributed("diloco:H=4")
    train(model, optimizer, batches(6))
    before = copy.deepcopy(model.state_dict())
    with fd.averaged(model):
        assert_same_bits(model)
        assert any(not torch.equal(before[name], each) for name, each in model.state_dict().items())
        nn.functional.mse_loss(model(torch.ones(1, 6).double()), torch.ones(1, 3).double()).backward()
        with pytest.raises(ConfigError, match=r"steps inside fd\.averaged"):
            optimizer.step()
    for name, each in model.state_dict().items():
        assert torch.equal(each, before[name])
    optimizer.zero_grad()
    train(model, optimizer, batches(2))  # and goes on
    fd.drain(model)
    assert_same_bits(model)


class Normed(nn.Module):
    """A model with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From (batch, 6) to (batch, 3)."""
        result: torch.Tensor = self.layers(x)
        return result


@pytest.mark.parametrize("sync", ["local:H=5", "local:H=8,fragments=2,overlap=1"])
@ranks(2)
def test_running_statistics_are_averaged_when_ranks_meet(sync: str) -> None:
    world = fd.init()
    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    fd.distribute(model, optimizer, fd.Plan(sync=sync))
    train(model, optimizer, batches(2))
    own = model.get_buffer("layers.1.running_mean").clone()
    everyones = all_gather_json(world, "test/mean", own.tolist())
    assert everyones[0] != everyones[1]
    fd.drain(model)
    mean = torch.tensor(everyones, dtype=torch.float64).mean(0)
    torch.testing.assert_close(model.get_buffer("layers.1.running_mean"), mean, rtol=1e-12, atol=1e-14)
    train(model, optimizer, batches(1))
    now = model.get_buffer("layers.1.running_mean").clone()
    with fd.averaged(model):
        assert torch.equal(model.get_buffer("layers.1.running_mean"), mean)
    assert torch.equal(model.get_buffer("layers.1.running_mean"), now)


@pytest.mark.gate_cases("none-skip", "int8-raise", "int8-propagate")
@pytest.mark.parametrize("nonfinite", ["propagate", "skip", "raise"])
@pytest.mark.parametrize("codec", ["none", "int8"])
@ranks(2)
def test_nan_on_one_rank_is_the_same_on_all(codec: str, nonfinite: str) -> None:
    world = fd.init()
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    fd.distribute(model, optimizer, fd.Plan(sync="local:H=2", codec=codec, nonfinite=nonfinite))  # type: ignore[arg-type]
    joined = [(x.float(), y.float()) for x, y in batches(8)]
    train(model, optimizer, joined[:3])
    with fd.averaged(model):
        before = copy.deepcopy(model.state_dict())
    if world.rank == 1:
        with torch.no_grad():
            model.get_parameter("2.weight")[3, 4] = torch.nan
    if nonfinite == "raise":
        with pytest.raises(CommError, match="NaN or infinity"):
            train(model, optimizer, joined[3:4])
        return
    train(model, optimizer, joined[3:4])
    if nonfinite == "propagate":
        assert all(each.isnan().all() for each in model.parameters())
        return
    for name, each in model.state_dict().items():
        assert torch.equal(each, before[name])
    train(model, optimizer, joined[4:])
    assert all(each.isfinite().all() for each in model.parameters())
    assert_same_bits(model)


@ranks(2)
def test_nan_in_what_travels_exactly_takes_back_what_the_codec_did() -> None:
    world = fd.init()
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fd.distribute(model, optimizer, fd.Plan(sync="local:H=2", codec="int8", nonfinite="skip"))
    train(model, optimizer, [(x.float(), y.float()) for x, y in batches(3)])
    exchange = local_steps(model).meetings._exchange
    before = exchange.state()["2.weight"]["elements"]["residual"]
    if world.rank == 1:
        with torch.no_grad():
            model.get_parameter("2.bias")[3] = torch.nan
    fd.drain(model)
    assert torch.equal(exchange.state()["2.weight"]["elements"]["residual"], before)
    assert before.abs().max() > 0


@ranks(2)
def test_ranks_that_meet_after_other_numbers_of_steps_are_told() -> None:
    world = fd.init()
    model, optimizer = distributed("local:H=4")
    train(model, optimizer, batches(3 if world.rank == 0 else 2))
    with pytest.raises(Mismatch, match=r"its steps since the last one: 3 on rank 0, 2 on rank 1"):
        fd.drain(model)


@ranks(2)
def test_parameters_that_one_rank_alone_loads_are_told() -> None:
    world = fd.init()
    model, optimizer = distributed("local:H=2")
    train(model, optimizer, batches(2))
    if world.rank == 1:
        model.load_state_dict(mlp(3).double().state_dict())
    with pytest.raises(Mismatch, match="averaged parameters on ranks 0 and 1"):
        train(model, optimizer, batches(2))


@ranks(2)
def test_parameters_that_all_load_are_the_averaged_ones() -> None:
    fd.init()
    model, optimizer = distributed("diloco:H=3", "adagrad")
    train(model, optimizer, batches(4))
    model.load_state_dict(mlp(3).double().state_dict())
    for name, each in mlp(3).double().named_parameters():
        with fd.averaged(model):
            assert torch.equal(model.get_parameter(name), each)
    train(model, optimizer, batches(3))
    fd.drain(model)
    assert_same_bits(model)


@ranks(2)
def test_a_grad_scaler_is_refused() -> None:
    fd.init()
    model, optimizer = distributed("local:H=2")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 6).double()).sum()).backward()
    with pytest.raises(ConfigError, match="GradScaler"):
        scaler.step(optimizer)


@ranks(2)
def test_a_parameter_that_comes_later_is_refused() -> None:
    fd.init()
    model = mlp().double()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    fd.distribute(model, optimizer, fd.Plan(sync="local:H=2"))
    train(model, optimizer, batches(2))
    model[0].requires_grad_(True)
    with pytest.raises(ConfigError, match=r"did not train when"):
        train(model, optimizer, batches(2))


@ranks(2)
def test_two_optimizers_step_by_the_last() -> None:
    fd.init()
    model = mlp().double()
    first = torch.optim.SGD(model[0].parameters(), 0.05)
    second = torch.optim.AdamW([*model[2].parameters(), *model[4].parameters()], 0.01)
    fd.distribute(model, [first, second], fd.Plan(sync="local:H=3"))
    for step in range(1, 7):
        x, y = batches(6)[step - 1]
        nn.functional.mse_loss(model(x[fd.world().rank :: 2]), y[fd.world().rank :: 2]).backward()
        for each in (first, second):
            each.step()
            each.zero_grad()
        digests = all_gather_json(fd.world(), "test/two", [float(p.detach().sum()) for p in model.parameters()])
        assert (digests[0] == digests[1]) == (step % 3 == 0)
    for _ in range(3):
        first.step()
    with pytest.raises(ConfigError, match="the optimizer that steps in every iteration last"):
        first.step()


@pytest.mark.gate_cases("2")
@pytest.mark.parametrize("accumulate", [1, 2])
@ranks(2)
def test_step_and_accumulation_are_those_of_a_rank_alone(accumulate: int) -> None:
    world = fd.init()
    model, optimizer = distributed("local:H=100", micro_batches=2)
    alone = mlp().double()
    plain = OPTIMIZERS["sgd"](alone.parameters())
    for number, (x, y) in enumerate(batches(6), start=1):
        xs, ys = x.chunk(2)[world.rank], y.chunk(2)[world.rank]
        loss = fd.step(model, nn.functional.mse_loss, xs, ys)
        expected = nn.functional.mse_loss(alone(xs), ys)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=1e-12)
        expected.backward()
        if number % accumulate == 0:
            for each in (optimizer, plain):
                each.step()
                each.zero_grad()
    assert_close(model, alone, rtol=1e-10, atol=1e-12)
    whole = batches(1)[0]
    mean = fd.evaluate(model, nn.functional.mse_loss, whole[0].chunk(2)[world.rank], whole[1].chunk(2)[world.rank])
    assert all_gather_json(world, "test/loss", float(mean))[0] == float(mean)


@ranks(2)
def test_clipping_is_of_a_ranks_own_norm() -> None:
    world = fd.init()
    model, optimizer = distributed("local:H=100", clip_norm=0.05)
    alone = mlp().double()
    plain = OPTIMIZERS["sgd"](alone.parameters())
    for x, y in batches(4):
        xs, ys = x.chunk(2)[world.rank], y.chunk(2)[world.rank]
        for each, by in ((model, optimizer), (alone, plain)):
            by.zero_grad()
            nn.functional.mse_loss(each(xs), ys).backward()
            if each is alone:
                nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
            by.step()
    assert_close(model, alone, rtol=1e-10, atol=1e-12)


@ranks(2)
def test_weights_by_count_are_refused() -> None:
    fd.init()
    model, _ = distributed("local:H=2")
    assert local_steps(model).is_local
    with pytest.raises(ConfigError, match=r"fd\.weight"):
        fd.weight(3.0)


@ranks(2)
def test_meetings_are_recorded_as_exchanges() -> None:
    world = fd.init()
    model, optimizer = distributed("local:H=3")
    seen: list[Any] = []
    original = world.session.recorder

    class Watching:
        def record(self, event: Any) -> None:
            seen.append(event)
            original.record(event)

    world.session.recorder = Watching()
    train(model, optimizer, batches(9))
    found = [each for each in seen if isinstance(each, Exchange)]
    nbytes = sum(each.nbytes for each in model.parameters())
    assert [each.sent_bytes for each in found] == [nbytes] * 3
    world.session.recorder = original


@ranks(2)
def test_a_state_dict_of_one_rank_alone_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = fd.init()
    said: list[str] = []
    monkeypatch.setattr("farandole.sync.local_steps.write_notice", said.append)
    model, optimizer = distributed("local:H=4")
    train(model, optimizer, batches(4))
    model.state_dict()
    assert not said
    train(model, optimizer, batches(1))
    with fd.averaged(model):
        model.state_dict()
    assert not said
    model.state_dict()
    copy.deepcopy(model).state_dict()
    model.state_dict()
    assert len(said) == (1 if world.rank == 0 else 0)
    assert all("this rank alone changed in 1 steps" in each for each in said)


@ranks(2)
def test_steps_that_no_mean_has_are_said_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    world = fd.init()
    said: list[str] = []
    monkeypatch.setattr("farandole.sync.local_steps.write_notice", said.append)
    model, optimizer = distributed("streaming:H=6,fragments=3,overlap=2", codec="int8")
    train(model, optimizer, batches(7))
    fd.shutdown()
    assert [("steps of each rank were in no mean" in each) for each in said] == [True] * (world.rank == 0)


@ranks(2)
def test_a_model_that_is_gone_before_the_end_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained in a function, as most are: its connections close, and what no mean has is said."""
    world = fd.init()
    said: list[str] = []
    monkeypatch.setattr("farandole.sync.local_steps.write_notice", said.append)

    def main() -> None:
        model = language_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        fd.distribute(model, optimizer, fd.Plan(sync="streaming:H=6,fragments=3,overlap=2", codec="int8"))
        train(model, optimizer, [(x.float(), y.float()) for x, y in batches(7)])
        assert "farandole-conductor" in {each.name for each in threading.enumerate()}

    main()
    gc.collect()
    fd.shutdown()
    assert not [each.name for each in threading.enumerate() if each.name.startswith("farandole")]
    assert [("steps of each rank were in no mean" in each) for each in said] == [True] * (world.rank == 0)


@pytest.mark.parametrize(
    ("sync", "codec"), [("diloco:H=4", "none"), ("streaming:H=6,fragments=3,overlap=2", "int4")]
)
@ranks(2)
def test_a_training_goes_on_from_a_checkpoint_to_the_bit(sync: str, codec: str, tmp_path: Path) -> None:
    world = fd.init()
    folder = Path(all_gather_json(world, "test/folder", str(tmp_path))[0])
    joined = [(x.float(), y.float()) for x, y in batches(21)]

    def make() -> tuple[nn.Module, Optimizer]:
        model = language_model()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        fd.distribute(model, optimizer, fd.Plan(sync=sync, codec=codec))
        return model, optimizer

    model, optimizer = make()
    train(model, optimizer, joined[:9])
    fd.save(folder, model, optimizer, step=9)
    assert_same_bits(model)
    moments = [float(optimizer.state[each]["exp_avg"].sum()) for each in model.parameters()]
    first, second = all_gather_json(world, "test/moments", moments)
    assert all(one != other for one, other in zip(first, second, strict=True))
    train(model, optimizer, joined[9:])
    other, its = make()
    train(other, its, joined[3:5])
    assert fd.load(folder, other, its) == 9
    train(other, its, joined[9:])
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        for key, value in optimizer.state[a].items():
            assert torch.equal(value, its.state[b][key])
    every = language_model()
    plain = torch.optim.AdamW(every.parameters(), 0.01)
    fd.distribute(every, plain)
    fd.load(folder, every, plain)  # rank 0's moments, for all of them
    assert_same_bits(every)
    assert [float(plain.state[each]["exp_avg"].sum()) for each in every.parameters()] == first


@ranks(2)
def test_verify_refuses_what_is_not_to_be_equal() -> None:
    fd.init()
    model, optimizer = distributed("local:H=2")
    with pytest.raises(ConfigError, match="ranks train on their own"):
        fd.verify(model, optimizer)


class Choice:
    """What codec "auto" has chosen, and what it says of local steps."""

    def __init__(self, every_seconds: float, local_seconds: float) -> None:
        self.choice = SimpleNamespace(seconds=every_seconds, main_codec="powersgd:rank=4")
        self._local = LocalPrediction(4, local_seconds, 0.1)

    def predict_local_steps(self, codec: str, other_seconds: float) -> LocalPrediction:
        """As the tuner does."""
        assert codec == "int4"
        assert other_seconds == 0.0, "a step here takes less than a second"
        return self._local


@pytest.mark.parametrize(("local_seconds", "gains"), [(0.79, True), (0.81, False), (2.0, False)])
@ranks(2)
def test_auto_takes_local_steps_where_they_gain_a_quarter_and_says_both_numbers(
    local_seconds: float, gains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = fd.init()
    said: list[str] = []
    monkeypatch.setattr("farandole.sync.local_steps.write_notice", said.append)
    model, optimizer = distributed("auto", codec="auto", lossy=True)
    policy = DistributedModel.of(model).policy
    assert isinstance(policy, MeasuredSync)
    tuners = iter([SimpleNamespace(choice=None)] * 4)
    policy._tuner = lambda: next(tuners, Choice(1.0, local_seconds))  # type: ignore[assignment, return-value]
    train(model, optimizer, batches(4 + TIMED_STEPS))
    assert not said
    train(model, optimizer, batches(1))
    assert policy.is_local is gains
    assert (DistributedModel.of(model).reducer is None) is gains
    if world.rank == 0:
        (line,) = said
        assert "powersgd:rank=4" in line
        assert ("local:H=4 with int4" in line) is gains
    alike = []
    for each in batches(9)[:8]:
        train(model, optimizer, [each])
        sums = all_gather_json(world, "test/auto", [float(p.detach().sum()) for p in model.parameters()])
        alike.append(sums[0] == sums[1])
    assert alike == ([False, False, False, True] * 2 if gains else [True] * 8)


@ranks(2)
def test_auto_stays_with_each_step_where_ranks_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fd.init()
    said: list[str] = []
    monkeypatch.setattr("farandole.sync.local_steps.write_notice", said.append)
    model, optimizer = distributed("auto", codec="auto", lossy=True)
    train(model, optimizer, batches(4))
    assert_same_bits(model)
    assert all("no link is crossed" in each for each in said)
    assert not DistributedModel.of(model).policy.is_local  # type: ignore[union-attr]


@ranks(2)
def test_what_looks_at_gradients_of_all_ranks_refuses_it() -> None:
    world = fd.init()
    model, _ = distributed("post_local:H=2,first=4")
    with pytest.raises(ConfigError, match="ranks exchange no gradients to compare"):
        fd.noise_scale(model)
    assert "only exchanges of each step are tuned" in why_not(world)


@ranks(2)
def test_front_ends_that_save_by_themselves_refuse_it() -> None:
    from farandole.parallel.distribute import distribute

    fd.init()
    model = mlp()
    with pytest.raises(PlanError, match=r"for loops that call farandole\.distribute themselves"):
        distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(sync="local:H=2"))


@ranks(2)
def test_a_model_that_was_refused_late_is_as_it_was() -> None:
    rank = fd.init().rank
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refused = fd.Plan(sync="post_local:H=99,fragments=99", precision="bf16")
    for _ in range(2):
        with pytest.raises(ConfigError, match="99 fragments, but 2 parameters train"):
            fd.distribute(model, optimizer, refused)
        assert type(model) is nn.Linear, "it casts no more"
    fd.distribute(model, optimizer, fd.Plan(sync="local:H=9"))
    model(torch.full((1, 3), rank + 1.0)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[rank + 1.0] * 3], "no exchange of the first plan is there"


class Outer(Optimizer):
    """Steps another one within its own step."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step the other one."""
        self.inner.step()


@pytest.mark.full_cases("server")
@pytest.mark.parametrize("sync", ["local:H=2", "server"])
@ranks(2)
def test_an_optimizer_that_was_made_later_is_refused_and_a_wrapper_is_not(sync: str) -> None:
    fd.init()
    model, other = nn.Linear(4, 2), nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fd.distribute(model, optimizer, fd.Plan(sync=sync))
    for each in (model, other):
        each(torch.ones(3, 4)).sum().backward()
    Outer(optimizer).step()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    model(torch.ones(3, 4)).sum().backward()
    with pytest.raises(ConfigError, match=r"a Adam that farandole.distribute was not given"):
        torch.optim.Adam(model.parameters()).step()
    fd.drain(model)
    fd.shutdown()
    torch.optim.Adam(model.parameters()).step()


@pytest.mark.gate_cases("local:H=2")
@pytest.mark.parametrize("sync", ["local:H=2", "post_local:H=2,first=1"])
@ranks(2)
def test_what_a_policy_holds_is_free_when_the_model_is(sync: str) -> None:
    """Without waiting for the collection of cycles, which a loop on an accelerator turns off."""
    fd.init()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fd.distribute(model, optimizer, fd.Plan(sync=sync))
    policy = DistributedModel.of(model).policy
    assert policy is not None
    seen = weakref.ref(policy)
    gc.collect()
    gc.disable()
    try:
        del model, optimizer, policy
        assert seen() is None, "something holds it in a circle"
    finally:
        gc.enable()


@ranks(2)
def test_a_model_that_dies_in_the_middle_of_another_optimizers_step_ends_no_step() -> None:
    fd.init()
    first = distributed("local:H=2")
    seen = weakref.ref(first[0])
    train(*first, batches(2))
    fd.drain(first[0])
    kept: list[Any] = [first]
    kept.append(kept)  # as in a notebook: nothing but the collector frees it
    del first

    def free(*_: Any) -> None:
        kept.clear()
        gc.collect()

    alone = mlp().double()
    other = torch.optim.SGD(alone.parameters(), 0.05)
    hooks = [register(each) for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
             for each in (free, lambda *_: None)]  # fmt: skip
    try:
        alone(torch.ones(2, 6).double()).sum().backward()
        other.step()
    finally:
        for hook in hooks:
            hook.remove()
    assert seen() is None, "it has died"
