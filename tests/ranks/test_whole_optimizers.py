"""Optimizers that look at all parameters in their step: refused by name where a rank has some of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import farandole as fd
from farandole.parallel.optim.elementwise import why_not_by_parameters, why_not_elementwise
from tests.ranks.pool import ranks
from tests.ranks.reference import data, mlp, own
from tests.ranks.sharded_cases import require_close


class Clipped(torch.optim.Optimizer):
    """SGD that bounds the norm of all gradients inside of its step, as a number or by operations of torch."""

    def __init__(self, parameters: Any, *, by_torch: bool, bound: float = 0.05) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.by_torch, self.bound = by_torch, bound

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            gradients = [each.grad for each in group["params"]]
            if self.by_torch:
                norm = torch.stack([each.norm() for each in gradients]).norm()
                factor: Any = (self.bound / (norm + 1e-12)).clamp(max=1.0)
            else:
                factor = min(1.0, self.bound / (sum(float(each.square().sum()) for each in gradients) ** 0.5))
            for each, gradient in zip(group["params"], gradients, strict=True):
                each.add_(gradient * factor, alpha=-group["lr"])


class Learned(torch.optim.Optimizer):
    """Learns its step size from products over all parameters, as D-Adaptation does (Defazio 2301.07733)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0, "d": 1e-3, "sum": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            size = 1e-12
            for each in group["params"]:
                total = self.state[each].setdefault("total", torch.zeros_like(each))
                group["sum"] += group["d"] * float((each.grad * total).sum())
                total.add_(each.grad, alpha=group["d"])
                size += float(total.abs().sum())
                each.sub_(each.grad, alpha=group["d"])
            group["d"] = max(group["d"], group["sum"] / size)


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(5))]


@pytest.mark.parametrize("bound", [0.05, 30.0])
def test_reasons_are_those_of_the_optimizer(bound: float) -> None:
    for each in (Clipped(parameters(), by_torch=False, bound=bound), Learned(parameters())):
        assert why_not_elementwise(each) == "its update of a parameter depends on other parameters"
        assert why_not_by_parameters(each) == "its update of a parameter depends on other parameters"
    rows = torch.optim.Adafactor(parameters())
    assert why_not_elementwise(rows) == "its update of an element depends on others of the same parameter"
    assert not why_not_by_parameters(rows), "a parameter is updated alone"
    optim: Any = torch.optim
    names = "Adam", "AdamW", "RMSprop", "NAdam", "ASGD", "RAdam", "Adagrad", "Adadelta", "Adamax", "Rprop"
    for kind in (getattr(optim, name) for name in names):
        assert not why_not_elementwise(kind(parameters())), kind
        assert not why_not_by_parameters(kind(parameters())), kind


def test_a_schedule_that_begins_at_zero_and_many_groups_hide_nothing() -> None:
    matrix = [nn.Parameter(torch.ones(6, 4))]
    for rate in (0.0, 1e-6, torch.tensor(0.0)):
        assert why_not_elementwise(torch.optim.Muon(matrix, lr=rate)), rate  # type: ignore[arg-type]
        assert not why_not_elementwise(torch.optim.AdamW(matrix, lr=rate)), rate
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": 1.0 / (i + 1)} for i in range(40)]
    optimizer = torch.optim.SGD([*groups, {"params": matrix, "momentum": 0.5}])
    steps = 0

    class Counted(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            nonlocal steps
            steps += 1
            return super().step(closure)

    optimizer.__class__ = Counted
    assert not why_not_elementwise(optimizer)
    assert steps == 2 * 2 * 4 * 24, "two kinds of groups and of gradients; whole, in parts, and each alone"


class Ahead(torch.optim.Optimizer):
    """Steps another optimizer, as Lookahead does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step()


def test_a_trial_steps_nothing_of_the_users_and_proves_nothing_by_no_change() -> None:
    whole = [nn.Parameter(torch.ones(6, 4))]
    whole[0].grad = torch.ones(6, 4)
    assert "it steps another optimizer" in why_not_elementwise(Ahead(torch.optim.SGD(whole, 0.1)))
    assert torch.equal(whole[0], torch.ones(6, 4))
    idle = torch.optim.SGD(whole, 0.1)
    idle.__class__ = type("Idle", (torch.optim.SGD,), {"step": lambda self, closure=None: None})
    assert "it changes nothing" in why_not_elementwise(idle)


@ranks(2)
def test_every_plan_that_divides_refuses_them() -> None:
    fd.init()
    for plan in (fd.Plan(zero=1), fd.Plan(zero=2), fd.Plan(zero=3), fd.Plan(tensor=2), fd.Plan(pipeline=2)):
        for make in (lambda p: Clipped(p, by_torch=False), Learned):
            model = mlp()
            before = [each.detach().clone() for each in model.parameters()]
            optimizer: Any = make(model.parameters())
            words = r"(Clipped|Learned).*(depends on other parameters|is another one)"
            with pytest.raises(fd.ConfigError, match=words):
                fd.distribute(model, optimizer, plan)
            assert all(map(torch.equal, before, model.parameters())), plan
            assert not optimizer.state, "the trial is on tensors of its own"


@ranks(2)
def test_a_norm_by_torchs_operations_is_right_at_zero_3() -> None:
    fd.init()
    reference, model = mlp(), mlp()
    plain, optimizer = (Clipped(each.parameters(), by_torch=True) for each in (reference, model))
    fd.distribute(model, optimizer, fd.Plan(zero=3))
    for step in range(3):
        x, y = data(12, step)
        for each, a, b in ((reference, x, y), (model, own(x), own(y))):
            each.zero_grad()
            mse_loss(each(a), b).backward()
        plain.step(), optimizer.step()
    require_close(model, reference, "norm over shards", 1e-5)
