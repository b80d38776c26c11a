"""Plan key ``precision``: autocast and loss scaling without a change of the loop, on one rank and on several."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import inspect
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.core.vocabulary.errors import ConfigError, PlanError
from farandole.core.vocabulary.events import Event, Logged
from farandole.parallel.distribute import undistribute
from farandole.parallel.loss_scaling import BACKOFF, GOOD_STEPS, INITIAL, DynamicLossScale
from farandole.parallel.lower_precision import loss_scale_of
from farandole.parallel.model import DistributedModel
from tests.ranks.pool import fresh, ranks
from tests.ranks.reference import assert_same_bits, data, mlp, own

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def plain_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y)


def penalty_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Parameters in the loss that do not come through the model's forward pass."""
    penalty = sum((parameter.square().sum() for parameter in model.parameters()), torch.zeros(()))
    return plain_loss(model, x, y) + 0.01 * penalty


class Autocast(nn.Module):
    """What a script would write without the plan key."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=self.dtype):
            out: torch.Tensor = self.model(x)
        return out.float()


def scale_of(model: nn.Module) -> DynamicLossScale:
    scale = loss_scale_of(model)
    assert scale is not None, "gradients are not scaled"
    return scale


def ready(precision: Any, model: nn.Module | None = None, **keys: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = model or mlp()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    return fd.distribute(model, optimizer, fd.Plan(precision=precision, **keys))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.gate_cases("1-bf16-penalty_loss", "2-bf16-plain_loss", "2-fp16-penalty_loss", "1-fp16-plain_loss")
@pytest.mark.parametrize("loss_of", [plain_loss, penalty_loss])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@ranks(1, 2)
def test_gradients_are_those_of_autocast_and_true(precision: str, loss_of: Loss) -> None:
    fd.init()
    model, _ = ready(precision)
    alone = mlp()
    x, y = data(16)
    for _ in range(2):  # the second pass adds to the first
        loss_of(model, own(x), own(y)).backward()
        loss_of(Autocast(alone, DTYPES[precision]), x, y).backward()
        for mine, expected in zip(gradients(model), gradients(alone), strict=True):
            assert mine.dtype == torch.float32, "a gradient is not in float32"
            torch.testing.assert_close(mine, expected, rtol=0.02, atol=0.003)


@pytest.mark.full("slow")
@ranks(1, 2)
@fresh
def test_a_model_that_is_gone_takes_nothing_from_one_with_its_numbers() -> None:
    """A parameter that is made later may have the ``id`` of one that is gone, whose model is collected late."""
    fd.init()
    late = ready("fp16")[0]
    passes, _ = DistributedModel.of(late).passes, gc.collect()
    gone = {id(parameter) for parameter in late.parameters()}
    del late
    gc.collect()
    made = [mlp() for _ in range(1000)]
    again = next((each for each in made if {id(parameter) for parameter in each.parameters()} & gone), None)
    assert again is not None, "no number came again"
    model, _ = ready("fp16", again)
    alone = mlp()
    del passes
    gc.collect()
    x, y = data(16)
    penalty_loss(model, own(x), own(y)).backward()
    penalty_loss(alone, x, y).backward()
    for mine, expected in zip(gradients(model), gradients(alone), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0.02, atol=0.001)


KEYS: list[dict[str, Any]] = [
    {}, {"codec": "int8"}, {"clip_norm": 0.5}, {"accumulate": 2}, {"recompute": ("2",)},
]  # fmt: skip


@pytest.mark.gate_cases("1-fp16-keys3")
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@ranks(1, 2)
def test_training_follows_float32_and_ranks_keep_the_same_bits(precision: str, keys: dict[str, Any]) -> None:
    fd.init()
    losses: dict[str, list[float]] = {}
    for each in ("fp32", precision):
        model, optimizer = ready(each, **keys)
        losses[each] = []
        for step in range(12):
            x, y = data(16, seed=step % 3)
            loss = plain_loss(model, own(x), own(y))
            assert loss.dtype == torch.float32, "the loss is not in float32"
            loss.backward()
            losses[each].append(float(loss.detach()))
            if step % keys.get("accumulate", 1) == keys.get("accumulate", 1) - 1:
                optimizer.step()
                optimizer.zero_grad()
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters()), "no master weights"
        assert_same_bits(model)
    torch.testing.assert_close(losses[precision], losses["fp32"], rtol=0.03, atol=0.01)


@ranks(1, 2)
def test_what_float16_would_lose_arrives() -> None:
    """Gradients of the activations are below the smallest number of float16."""
    fd.init()
    model, _ = ready("fp16")
    alone = mlp()
    x, y = data(16)
    (plain_loss(model, own(x), own(y)) * 1e-7).backward()
    (plain_loss(alone, x, y) * 1e-7).backward()
    for mine, expected in zip(gradients(model), gradients(alone), strict=True):
        torch.testing.assert_close(mine * 1e7, expected * 1e7, rtol=0.05, atol=0.01)


@pytest.mark.gate_cases("1-int8")
@pytest.mark.parametrize("codec", ["none", "int8"])
@ranks(1, 2)
def test_one_rank_overflows_and_all_skip_the_step(codec: str) -> None:
    world = fd.init()
    model, optimizer = ready("fp16", codec=codec, clip_norm=1.0)
    x, y = data(16)
    before = copy.deepcopy(model.state_dict())
    factor = 1e6 if world.rank == world.size - 1 else 1.0
    (plain_loss(model, own(x), own(y)) * factor).backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)  # would hide an infinity
    optimizer.step()
    scale = scale_of(model)
    assert (scale.value, scale.skipped_steps, scale.good_steps) == (INITIAL * BACKOFF, 1, 0), vars(scale)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "it stepped"
    assert not optimizer.state, "the optimizer counted a step"
    assert gradients(model), "the loop cannot see the gradients"
    optimizer.zero_grad()
    plain_loss(model, own(x), own(y)).backward()
    optimizer.step()
    assert (scale.value, scale.skipped_steps, scale.good_steps) == (INITIAL * BACKOFF, 1, 1), vars(scale)
    assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"]), "it did not step"
    assert_same_bits(model)


@pytest.mark.full("slow")
@ranks(1)
def test_a_compiled_model_follows_the_scale() -> None:
    fd.init()
    model, _ = ready("fp16")
    alone = mlp()
    x, y = data(8)
    with warnings.catch_warnings(action="ignore"):
        compiled: Any = torch.compile(model, backend="aot_eager")
        for value in (INITIAL, 64.0):
            scale_of(model).value = value
            model.zero_grad()
            plain_loss(compiled, x, y).backward()
            alone.zero_grad()
            plain_loss(Autocast(alone, torch.float16), x, y).backward()
            for mine, expected in zip(gradients(model), gradients(alone), strict=True):
                torch.testing.assert_close(mine, expected, rtol=0.02, atol=0.003)


@ranks(2)
def test_float16_of_the_script_without_a_scaler_is_noticed_once() -> None:
    world = fd.init()
    for scaled in (True, False):
        model, optimizer = ready("fp32")
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            for _ in range(2):
                optimizer.zero_grad()
                loss = plain_loss(Autocast(model, torch.float16), *map(own, data(8)))
                (scaler.scale(loss) if scaled else loss).backward()
                scaler.step(optimizer) if scaled else optimizer.step()
                scaler.update() if scaled else None
        expected = 0 if scaled or world.rank else 1
        assert said.getvalue().count("no GradScaler scales the loss") == expected, said.getvalue()


class Heard:
    """A recorder that keeps what was logged."""

    def __init__(self) -> None:
        self.metrics: list[Any] = []

    def record(self, event: Event) -> None:
        if isinstance(event, Logged):
            self.metrics.append(event.metrics)


@ranks(1)
def test_skipped_steps_are_logged_and_what_never_ends_is_noticed() -> None:
    world = fd.init()
    heard = world.session.recorder = Heard()
    model, optimizer = ready("fp16")
    with contextlib.redirect_stderr(io.StringIO()) as said:
        for _ in range(18):
            optimizer.zero_grad()
            (plain_loss(model, *data(4)) * float("nan")).backward()
            optimizer.step()
    assert heard.metrics[1] == {"loss_scale": 16384.0, "skipped_steps": 2.0}, heard.metrics
    assert said.getvalue().count("17 steps were skipped, and at a loss scale of 1 gradients are still") == 1


@ranks(1)
def test_the_scale_grows_after_good_steps() -> None:
    fd.init()
    model, optimizer = ready("fp16")
    scale = scale_of(model)
    scale.good_steps = GOOD_STEPS - 1
    x, y = data(4)
    plain_loss(model, x, y).backward()
    optimizer.step()
    assert (scale.value, scale.good_steps) == (2 * INITIAL, 0), vars(scale)


@ranks(2)
def test_two_optimizers_of_one_model_decide_each_for_itself() -> None:
    fd.init()
    model = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in model]
    fd.distribute(model, optimizers, fd.Plan(precision="fp16"))
    scale = scale_of(model)
    scale.value = 256.0
    x, y = data(8)
    before = copy.deepcopy(model.state_dict())
    (plain_loss(model[0], own(x), own(y)) * 1e6 + plain_loss(model[1], own(x), own(y))).backward()
    for each in optimizers:
        each.step()
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    assert changed == ["1.weight", "1.bias"], changed
    assert (scale.value, scale.skipped_steps) == (128.0, 1), vars(scale)
    assert_same_bits(model)


@ranks(1)
def test_a_closure() -> None:
    fd.init()
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
    fd.distribute(model, optimizer, fd.Plan(precision="fp16"))
    x, y = data(8)
    factor = 1e6

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = plain_loss(model, x, y) * factor
        loss.backward()
        return loss

    before = copy.deepcopy(model.state_dict())
    optimizer.step(closure)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "it stepped"
    factor = 1.0
    first = plain_loss(model, x, y).detach()
    optimizer.step(closure)
    assert plain_loss(model, x, y).detach() < first, "it did not step"


class Pair(NamedTuple):
    first: torch.Tensor
    second: list[torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Wrapped:
    inner: dict[str, Any]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> tuple[Pair, Wrapped, None]:
        y = self.linear(x)
        return Pair(y, [y * 2]), Wrapped({"y": y * 3, "count": torch.ones(2, dtype=torch.int64)}), None


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@ranks(1)
def test_outputs_in_containers(precision: str) -> None:
    fd.init()
    model: Any
    model, _ = ready(precision, Nested())
    pair, wrapped, nothing = model(torch.ones(2, 6))
    assert nothing is None, "None became something"
    assert isinstance(pair, Pair), f"a named tuple became {type(pair)}"
    found = [pair.first, pair.second[0], wrapped.inner["y"]]
    assert [each.dtype for each in found] == [torch.float32] * 3, "outputs are not in float32"
    assert wrapped.inner["count"].dtype == torch.int64, "whole numbers were cast"
    (sum(each.sum() for each in found) / 1024).backward()
    torch.testing.assert_close(model.linear.bias.grad, torch.full((3,), 12.0 / 1024))


@ranks(1)
def test_gradients_of_inputs_are_true_and_models_meet() -> None:
    """A generator and a discriminator, each with a scale of its own."""
    fd.init()
    torch.manual_seed(0)
    generator, _ = ready("fp16", nn.Linear(6, 6))
    critic, _ = ready("fp16", nn.Linear(6, 1))
    plain = copy.deepcopy(generator), copy.deepcopy(critic)
    scale_of(critic).value = 256.0
    inputs = [torch.ones(2, 6, requires_grad=True) for _ in range(2)]
    critic(generator(inputs[0])).sum().backward()
    plain[1](plain[0](inputs[1])).sum().backward()
    for mine, expected in zip([generator, critic], plain, strict=True):
        for found, other in zip(gradients(mine), gradients(expected), strict=True):
            torch.testing.assert_close(found, other, rtol=0.01, atol=0.01)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=0.01, atol=0.01)


class Leaking(nn.Module):
    """A model whose loss uses what its forward pass does not return."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
        self.features = torch.zeros(())
        self.hidden = [torch.ones(6, requires_grad=True)]

    def forward(self, x: torch.Tensor, *, hidden: bool = False) -> torch.Tensor:
        self.features = self.first(x * self.hidden[0] if hidden else x)
        out: torch.Tensor = self.second(self.features)
        return out


@ranks(1)
def test_what_cannot_be_scaled_is_refused() -> None:
    fd.init()
    model: Any
    model, _ = ready("fp16", Leaking())
    with pytest.raises(ConfigError, match="from inside of the forward pass that is none of its outputs"):
        (model(torch.ones(2, 6)).sum() + model.features.float().sum()).backward()
    with pytest.raises(ConfigError, match="create_graph=True"):
        torch.autograd.grad(model(torch.ones(2, 6)).sum(), model.first.weight, create_graph=True)
    model, _ = ready("fp16", Leaking())
    with pytest.raises(ConfigError, match=r"1 tensors that require a gradient .*\(shapes \(6,\)\)"):
        model(torch.ones(2, 6), hidden=True)
    model, optimizer = ready("fp16")
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(plain_loss(model, *data(4))).backward()
    with pytest.raises(ConfigError, match="and so does a GradScaler of the script"):
        scaler.step(optimizer)


@pytest.mark.parametrize(
    ("model", "precision", "text"),
    [
        (nn.Linear(2, 2).half(), "fp16", "'weight' (and 1 more) is in lower precision already"),
        (nn.Linear(2, 2).double(), "bf16", "has no effect: no parameter of Linear is float32"),
    ],
)
@ranks(1, 2)
def test_models_that_have_no_master_weights(model: nn.Module, precision: str, text: str) -> None:
    fd.init()
    with pytest.raises(PlanError) as caught:
        ready(precision, model)
    assert text in str(caught.value), str(caught.value)


@ranks(1)
def test_a_parameter_in_the_place_of_one_that_is_gone_is_not_scaled() -> None:
    fd.init()
    gc.disable()
    try:
        for _ in range(20):
            gone = ready("fp16")
            del gone
            model = mlp()
            model(torch.ones(2, 6)).sum().backward()
            assert all(float(each.abs().max()) < 100.0 for each in gradients(model)), "a gradient was multiplied"
    finally:
        gc.enable()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@ranks(1)
def test_copies_are_plain_and_undistribute_removes_it(precision: str) -> None:
    fd.init()
    model, _ = ready(precision)
    kind = nn.Sequential
    assert isinstance(model, kind), "isinstance has changed"
    assert list(inspect.signature(model.forward).parameters) == ["input"], "the signature of forward has changed"
    x, y = data(4)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(copied) is kind, type(copied)
        seen = []
        copied[2].register_forward_hook(lambda _, __, out: seen.append(out.dtype))  # noqa: B023 - called at once
        plain_loss(copied, x, y).backward()
        assert seen == [torch.float32], "a copy computes in lower precision"
        assert not gradients(model), "a copy computes with the model's own parameters"
    undistribute(model)
    assert type(model) is kind, type(model)
    plain_loss(model, x, y).backward()
    reference = mlp()
    plain_loss(reference, x, y).backward()
    assert all(map(torch.equal, gradients(model), gradients(reference))), "something was left"


@pytest.mark.gate_cases("1")
@ranks(1, 2)
def test_the_scale_is_part_of_a_checkpoint(tmp_path: Any) -> None:
    fd.init()
    model, optimizer = ready("fp16")
    scale_of(model).load_state_dict({"scale": 512.0, "good_steps": 7, "skipped_steps": 3})
    fd.save(tmp_path, model, optimizer, step=1)
    undistribute(model)
    model, optimizer = ready("fp16")
    assert fd.load(tmp_path, model, optimizer) == 1, "no step was loaded"
    found = scale_of(model).state_dict()
    assert found == {"scale": 512.0, "good_steps": 7, "skipped_steps": 3}, found
