"""What an optimizer's step is: closures, scalers, several optimizers, gradients by hand, new parameters."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.core.vocabulary.spec import RouteName
from farandole.parallel.distribute import undistribute
from farandole.parallel.model import DistributedModel
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_close, assert_same_bits, data, mlp, own, train_alone

Closure = Callable[[], Any]


def _closure(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor, passes: int = 1
) -> Closure:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for a, b in zip(x.chunk(passes), y.chunk(passes), strict=True):
            loss = nn.functional.mse_loss(model(a), b) / passes
            loss.backward()
            total = total + loss.detach()
        return total

    return closure


def _clipped(closure: Closure, model: nn.Module, norm: float | None) -> Closure:
    def clipped() -> Any:
        loss = closure()
        if norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), norm)
        return loss

    return clipped


def _lbfgs(line_search: str | None) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.LBFGS(model.parameters(), 0.5, max_iter=5, line_search_fn=line_search)


KINDS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "lbfgs": _lbfgs(None),
    "strong_wolfe": _lbfgs("strong_wolfe"),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 0.3, momentum=0.9),
}


@pytest.mark.gate_cases("sgd-2")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", list(KINDS))
@ranks(2)
def test_closures_see_what_one_process_sees(kind: str, accumulate: int) -> None:
    fd.init()
    for clip_norm in (None, 0.05):
        model, alone = mlp().double(), mlp().double()
        optimizer, other = KINDS[kind](model), KINDS[kind](alone)
        fd.distribute(model, optimizer, fd.Plan(accumulate=accumulate, clip_norm=clip_norm))
        for step in range(3):
            x, y = (tensor.double() for tensor in data(8, step))
            mine = optimizer.step(_closure(model, optimizer, own(x), own(y)))
            closure = _closure(alone, other, x, y)

            def clipped(
                closure: Closure = closure, norm: float | None = clip_norm, alone: nn.Module = alone
            ) -> Any:
                loss = closure()
                if norm is not None:
                    nn.utils.clip_grad_norm_(alone.parameters(), norm)
                return loss

            torch.testing.assert_close(mine, other.step(clipped), rtol=1e-9, atol=1e-9)
        assert_same_bits(model)
        assert_close(model, alone, rtol=1e-6, atol=1e-8)


@ranks(2)
def test_a_closure_may_return_the_loss_as_it_is() -> None:
    """As in torch's documentation: with its graph. torch warns of a number that is made of such a tensor."""
    fd.init()
    model = mlp()
    optimizer = KINDS["sgd"](model)
    fd.distribute(model, optimizer)
    x, y = data(8)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(own(x)), own(y))
        loss.backward()
        return loss

    alone = float(nn.functional.mse_loss(mlp()(x), y).detach())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mean = optimizer.step(closure)  # type: ignore[arg-type]  # torch takes tensors too
    assert float(mean) == pytest.approx(alone, rel=1e-6)


@ranks(2)
def test_a_closure_of_several_passes_accumulates() -> None:
    fd.init()
    model, alone = mlp(), mlp()
    optimizer, other = KINDS["sgd"](model), KINDS["sgd"](alone)
    fd.distribute(model, optimizer, fd.Plan(accumulate=2))
    for step in range(3):
        x, y = data(8, step)
        optimizer.step(_closure(model, optimizer, own(x), own(y), passes=2))
        other.step(_closure(alone, other, x, y))
    assert_same_bits(model)
    assert_close(model, alone)


class Sam(torch.optim.Optimizer):
    """Two passes a step: up the slope, then down from where it was."""

    def __init__(self, parameters: Any, base: torch.optim.Optimizer) -> None:
        super().__init__(parameters, {})
        self.base = base

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        grads = [p.grad.clone() for group in self.param_groups for p in group["params"]]
        norm = torch.sqrt(sum((g.square().sum() for g in grads), torch.zeros(())))
        parameters = [p for group in self.param_groups for p in group["params"]]
        for p, g in zip(parameters, grads, strict=True):
            p.add_(g, alpha=float(0.05 / norm))
        with torch.enable_grad():
            closure()
        for p, g in zip(parameters, grads, strict=True):
            p.sub_(g, alpha=float(0.05 / norm))
        self.base.step()


@ranks(2)
def test_two_passes_a_step() -> None:
    fd.init()
    model, alone = mlp(), mlp()
    optimizers = [Sam(m.parameters(), torch.optim.SGD(m.parameters(), 0.1)) for m in (model, alone)]
    fd.distribute(model, optimizers[0])
    for step in range(3):
        x, y = data(8, step)
        for each, its, a, b in ((model, optimizers[0], own(x), own(y)), (alone, optimizers[1], x, y)):
            closure = _closure(each, its, a, b)
            closure()
            its.step(closure)
    assert_same_bits(model)
    assert_close(model, alone)


def _clips_with_a_scaler(fused: bool) -> None:
    model, alone = mlp(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), 1.0, fused=fused)
    fd.distribute(model, optimizer, fd.Plan(clip_norm=0.05))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    other = torch.optim.SGD(alone.parameters(), 1.0)
    for step in range(3):
        x, y = data(8, step)
        optimizer.zero_grad()
        scaler.scale(nn.functional.mse_loss(model(own(x)), own(y))).backward()
        scaler.step(optimizer)
        scaler.update()
        other.zero_grad()
        nn.functional.mse_loss(alone(x), y).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
        other.step()
    assert_same_bits(model)
    assert_close(model, alone, rtol=1e-4, atol=1e-5)


@ranks(1, 2)
def test_clipping_with_a_scaler() -> None:
    fd.init()
    for fused in (False, True):
        _clips_with_a_scaler(fused)


@ranks(1, 2)
def test_several_optimizers_are_clipped_by_one_norm() -> None:
    fd.init()

    def optimizers(model: nn.Sequential) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(model[0].parameters(), 1.0), torch.optim.SGD(model[2:].parameters(), 1.0)]

    model, alone = mlp(), mlp()
    mine, other = optimizers(model), optimizers(alone)
    fd.distribute(model, mine, fd.Plan(clip_norm=0.05))
    for step in range(3):
        x, y = data(8, step)
        for each, its, a, b in ((model, mine, own(x), own(y)), (alone, other, x, y)):
            each.zero_grad()
            nn.functional.mse_loss(each(a), b).backward()
            if each is alone:
                nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
            for optimizer in its:
                optimizer.step()
    assert_same_bits(model)
    assert_close(model, alone)


@ranks(2)
def test_gradients_of_which_some_are_scaled_are_not_clipped() -> None:
    fd.init()
    model = mlp()
    mine = [torch.optim.SGD(model[0].parameters(), 1.0), torch.optim.SGD(model[2:].parameters(), 1.0)]
    fd.distribute(model, mine, fd.Plan(clip_norm=0.05))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    x, y = data(8)
    scaler.scale(nn.functional.mse_loss(model(own(x)), own(y))).backward()
    with pytest.raises(fd.ConfigError, match=r"scaler\.unscale_\(optimizer\)"):
        scaler.step(mine[0])


@ranks(2)
def test_a_scaler_and_a_group_of_passes_that_is_short_are_refused() -> None:
    fd.init()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    fd.distribute(model, optimizer, fd.Plan(accumulate=2))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    x, y = data(8)
    scaler.scale(nn.functional.mse_loss(model(own(x)), own(y))).backward()
    with pytest.raises(fd.ConfigError, match="GradScaler has looked at this rank's own gradients"):
        scaler.step(optimizer)


@pytest.mark.gate_cases("flat-int8", "auto-none")
@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("route", ["auto", "flat"])
@ranks(2)
def test_gradients_written_by_hand_are_exchanged_at_the_step(route: RouteName, codec: str) -> None:
    fd.init()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    alone = copy.deepcopy(model)
    optimizer, other = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(alone.parameters(), 0.1)
    fd.distribute(model, optimizer, fd.Plan(route=route, codec=codec, lossy=True))
    for step in range(6):
        x, y = data(8, step)
        for each, its, a, b in ((model, optimizer, own(x), own(y)), (alone, other, x, y)):
            loss = nn.functional.mse_loss(each(a), b)
            if step == 2:
                its.zero_grad()
                loss.backward()
            else:
                for p, g in zip(
                    each.parameters(), torch.autograd.grad(loss, list(each.parameters())), strict=True
                ):
                    if step < 4:
                        p.grad = g
                    else:  # in place
                        assert p.grad is not None
                        p.grad.copy_(g)
            its.step()
        assert_same_bits(model)
    assert_close(model, alone, rtol=0.02 if codec == "int8" else 1e-5, atol=0.01 if codec == "int8" else 1e-6)


@ranks(2)
def test_a_step_that_uses_the_same_gradients_again_exchanges_nothing() -> None:
    fd.init()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fd.distribute(model, optimizer)

    reducer = DistributedModel.of(model).reducer
    assert reducer is not None
    x, y = data(8)
    optimizer.step()  # without any gradient
    nn.functional.mse_loss(model(own(x)), own(y)).backward()
    optimizer.step()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    assert reducer.exchanges_done == 1


@pytest.mark.parametrize("plan", [
    fd.Plan(), fd.Plan(route="flat"), fd.Plan(route="flat", codec="int8", lossy=True), fd.Plan(accumulate=2),
])  # fmt: skip
@ranks(2)
def test_a_rank_that_misses_an_exchange_is_named_on_all(plan: fd.Plan) -> None:
    world = fd.init()
    model = nn.Sequential(nn.Linear(6, 64), nn.Linear(64, 64), nn.Linear(64, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    fd.distribute(model, optimizer, plan)
    elsewhere = nn.Parameter(torch.ones(1))
    done: list[int] = []

    def train() -> None:
        for step in range(5):
            for _ in range(plan.accumulate):
                x, y = data(8, step)
                loss = nn.functional.mse_loss(model(own(x)), own(y))
                (elsewhere.sum() if step == 2 and world.rank == 1 else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            done.append(step)

    told = r"exchange 3: optimizer steps made before it are 2 on rank 0, 3 on rank 1.*0 \* model"
    with pytest.raises(fd.Mismatch, match=told):
        train()
    assert done == ([0, 1] if world.rank == 0 else [0, 1, 2]), "rank 0 never used what it got in exchange 3"


@ranks(1, 2)
def test_parameters_that_come_later_are_refused() -> None:
    fd.init()

    def fresh() -> tuple[nn.Sequential, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(3, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        fd.distribute(model, optimizer)
        train(model, optimizer)
        return model, optimizer

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    model, optimizer = fresh()
    model.append(nn.Linear(3, 2))
    with pytest.raises(fd.ConfigError, match=r"parameter '1\.weight' came into the model after"):
        train(model, optimizer)
    model, optimizer = fresh()
    optimizer.add_param_group({"params": list(nn.Linear(3, 2).parameters())})
    with pytest.raises(fd.ConfigError, match=r"given 2 parameters \(shapes \(2, 3\), \(2,\)\)"):
        optimizer.step()
    model, optimizer = fresh()
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    with pytest.raises(fd.ConfigError, match=r"'0\.weight' came into the model after .*without assign"):
        train(model, optimizer)


@ranks(2)
def test_what_was_unfrozen_may_be_given_to_the_optimizer_later() -> None:
    fd.init()
    model, alone = mlp(), mlp()
    optimizers = [torch.optim.SGD(m[4].parameters(), 0.1) for m in (model, alone)]
    for m in (model, alone):
        m[0].requires_grad_(False)
        m[2].requires_grad_(False)
    fd.distribute(model, optimizers[0])
    for step in range(4):
        x, y = data(8, step)
        for each, its, a, b in ((model, optimizers[0], own(x), own(y)), (alone, optimizers[1], x, y)):
            if step == 2:
                each[2].requires_grad_(True)
                its.add_param_group({"params": list(each[2].parameters())})
            its.zero_grad()
            nn.functional.mse_loss(each(a), b).backward()
            its.step()
    assert_same_bits(model)
    assert_close(model, alone)


def _steps_inside_backward(before: bool) -> None:
    model = mlp()
    mine = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def hook(p: torch.Tensor) -> None:
        mine[p].step()  # type: ignore[index]
        mine[p].zero_grad()  # type: ignore[index]

    def register() -> None:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(hook)

    if before:
        register()
    fd.distribute(model, list(mine.values()))
    if not before:
        register()
    with pytest.raises(fd.ConfigError, match=r"an optimizer steps inside backward\(\)"):
        model(torch.ones(2, 6)).sum().backward()


@ranks(1, 2)
def test_steps_inside_backward_are_refused() -> None:
    fd.init()
    for before in (True, False):
        _steps_inside_backward(before)


@pytest.mark.parametrize("scaled", [False, True])
@ranks(2)
def test_a_fused_step_clips_as_it_reads_gradients(scaled: bool) -> None:
    fd.init()
    kinds: list[tuple[Any, dict[str, float]]] = [
        (torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adagrad, {}),
    ]  # fmt: skip
    for kind, settings in kinds:
        reference, model = mlp(), mlp()
        plain, optimizer = (
            kind(each.parameters(), lr=0.01, fused=True, **settings) for each in (reference, model)
        )
        fd.distribute(model, optimizer, fd.Plan(clip_norm=0.05))
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scaled)
        x, y = data(8)
        with pytest.MonkeyPatch.context() as patch:
            for _ in range(5):
                plain.zero_grad(), nn.functional.mse_loss(reference(x), y).backward()
                norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
                assert norm > 0.1, "it clips"
                plain.step()
                optimizer.zero_grad(), scaler.scale(nn.functional.mse_loss(model(own(x)), own(y))).backward()
                with patch.context() as only:
                    only.setattr(nn.utils, "clip_grad_norm_", None)  # a pass of its own is none
                    scaler.step(optimizer)
                    scaler.update()
                assert not {"grad_scale", "found_inf"} & set(vars(optimizer)), "the scale is of one step"
                for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-8)
        assert_close(model, reference)
        assert_same_bits(model)


@ranks(2)
def test_a_step_that_raises_leaves_no_scale_for_the_next() -> None:
    """And a step with gradients of float64, or without any, is clipped as ever."""
    fd.init()
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.0, fused=True)
    fd.distribute(model, optimizer, fd.Plan(clip_norm=0.01))
    optimizer.step()
    for attempt in range(2):
        optimizer.zero_grad(), model(torch.ones(4, 3)).sum().backward()
        lr = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = "none" if attempt == 0 else lr
        with pytest.raises((TypeError, RuntimeError)) if attempt == 0 else contextlib.nullcontext():
            optimizer.step()
        optimizer.param_groups[0]["lr"] = lr
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    assert float(nn.utils.get_total_norm(gradients)) == pytest.approx(0.01, rel=1e-3)
    double = nn.Linear(3, 2).double()
    steps = torch.optim.SGD(double.parameters(), 0.0, fused=True)
    fd.distribute(double, steps, fd.Plan(clip_norm=0.01))
    double(torch.ones(4, 3).double()).sum().backward()
    steps.step()
    norm = nn.utils.get_total_norm([each.grad for each in double.parameters() if each.grad is not None])
    assert float(norm) == pytest.approx(0.01, rel=1e-4)


@ranks(2)
def test_a_scheduler_may_be_made_before_and_after() -> None:
    """torch's schedulers take the method `step` apart, which some plans replace."""
    fd.init()
    for keys in ({"zero": 1}, {"zero": 2}, {"zero": 2, "bf16_parameters": True, "precision": "bf16"}):
        trained = []
        for is_early in (True, False):
            torch.manual_seed(1)
            model = nn.Linear(4, 4)
            optimizer = torch.optim.AdamW(model.parameters(), 0.1)
            made = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)] if is_early else []
            fd.distribute(model, optimizer, fd.Plan(**keys))
            scheduler = made[0] if made else torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(2, 4)).square().sum().backward()
                optimizer.step()
                scheduler.step()
            assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**3
            trained.append([each.detach().clone() for each in model.parameters()])
        assert all(torch.equal(*pair) for pair in zip(*trained, strict=True)), keys


@pytest.mark.gate_cases("sync", "clip_norm", "precision1")
@pytest.mark.parametrize(
    "keys",
    [
        {"clip_norm": 0.01},
        {"precision": "fp16"},
        {"precision": "bf16", "bf16_parameters": True},
        {"train_schedule": {"0": "0.*", "3": "2.*"}},
        {"sync": "local:H=2"},
    ],
    ids=lambda keys: next(iter(keys)),
)
@ranks(2)
def test_nothing_of_a_plan_is_left_when_it_is_undone(keys: dict[str, Any]) -> None:
    """The same optimizer trains on its own as without us, and then by another plan as one process does."""
    world = fd.init()
    model, by_hand = mlp(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fd.distribute(model, optimizer, fd.Plan(**keys))
    batches = [data(8, seed=number) for number in range(4)]
    train_alone(model, optimizer, [(own(x), own(y)) for x, y in batches[:2]])
    undistribute(model)
    for each in model.parameters():
        each.requires_grad_(True)
    by_hand.load_state_dict(model.state_dict())
    plain = torch.optim.SGD(by_hand.parameters(), 0.1)
    for mine, steps in ((model, optimizer), (by_hand, plain)):
        train_alone(mine, steps, [data(4, seed=world.rank)])
    assert_close(model, by_hand, rtol=0.0, atol=0.0)
    fd.distribute(model, optimizer)
    by_hand.load_state_dict(model.state_dict())
    train_alone(model, optimizer, [(own(x), own(y)) for x, y in batches[2:]])
    train_alone(by_hand, plain, batches[2:])
    assert_close(model, by_hand)
    assert_same_bits(model)
    undistribute(model)
    left = len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)
    assert left == (1, 1), "those that record are left, once"


@pytest.mark.parametrize("stage", [1, 2])
@ranks(2)
def test_an_optimizer_with_states_of_some_rows_does_not_step_when_its_plan_is_undone(stage: int) -> None:
    fd.init()
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    fd.distribute(model, optimizer, fd.Plan(zero=stage))
    train_alone(model, optimizer, [tuple(map(own, data(8)))])
    undistribute(model)
    with pytest.raises(fd.ConfigError, match="whose state is sharded steps, but its ranks exchange"):
        train_alone(model, optimizer, [data(4)])
