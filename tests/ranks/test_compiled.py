"""``torch.compile`` around what our hooks run in: functions that call backward, and optimizers' steps."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
from tests.ranks.pool import ranks, takes
from tests.ranks.reference import own

PLANS: list[dict[str, Any]] = [
    {"clip_norm": 0.5}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"tensor": 2},
]  # fmt: skip
WHAT = ("model", "model before", "backward", "step", "optimizer")
RECIPE = {"up": "columns", "down": "rows"}


def make() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = {"up": nn.Linear(4, 8), "middle": nn.Tanh(), "down": nn.Linear(8, 2)}
    model = nn.Sequential(OrderedDict(layers)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def compiled(call: Any) -> Any:
    return torch.compile(call, backend="aot_eager")


def batches() -> torch.Tensor:
    return torch.randn(3, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def train(plan: dict[str, Any], what: str) -> torch.Tensor:
    model, optimizer = make()
    called: Any = compiled(model) if what == "model before" else model
    divides: dict[str, Any] = {"tensor_recipe": RECIPE} if "tensor" in plan else {}
    fd.distribute(model, optimizer, fd.Plan(**plan, **divides))
    called = compiled(model) if what == "model" else called
    update: Any = compiled(optimizer.step) if what == "optimizer" else optimizer.step

    def backward(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = called(x).square().mean()
        loss.backward()
        return loss.detach()

    run: Any = compiled(backward) if what == "backward" else backward

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = run(x)
        update()
        return loss

    whole: Any = compiled(step) if what == "step" else step
    for x in batches():
        whole(x if divides else own(x))
    return seen(model)


def seen(model: nn.Module) -> torch.Tensor:
    """What the trained model says of inputs: of every parameter a function."""
    with torch.no_grad():
        out: torch.Tensor = model(batches()[0])
    return out


def train_alone(plan: dict[str, Any]) -> torch.Tensor:
    model, optimizer = make()
    for x in batches():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if "clip_norm" in plan:
            nn.utils.clip_grad_norm_(model.parameters(), plan["clip_norm"])
        optimizer.step()
    return seen(model)


@pytest.mark.full_cases("zero 3", "clips", "tensor", "zero 1", "zero 2")
@pytest.mark.parametrize("plan", PLANS, ids=["clips", "zero 1", "zero 2", "zero 3", "tensor"])
@ranks(2)
@takes(120)
def test_what_is_compiled_trains_as_one_process(plan: dict[str, Any]) -> None:
    fd.init()
    alone = train_alone(plan)
    for what in WHAT:
        torch._dynamo.reset()
        with quiet():
            mine = train(plan, what)
        torch.testing.assert_close(mine, alone, rtol=1e-10, atol=1e-10, msg=lambda m: f"{what}: {m}")  # noqa: B023


@pytest.mark.full("slow")
@ranks(2)
@takes(60)
def test_compiled_autograd_is_refused_on_all_ranks_at_every_stage() -> None:
    fd.init()
    for zero in range(4):
        model, optimizer = make()
        fd.distribute(model, optimizer, fd.Plan(zero=zero))
        with torch._dynamo.compiled_autograd._enable(compiled(None)), refused():
            model(batches()[0])
        loss = model(batches()[0]).sum()
        with torch._dynamo.compiled_autograd._enable(compiled(None)), refused(), quiet():
            loss.backward()
        with torch._dynamo.config.patch(compiled_autograd=True), refused(), quiet():
            compiled(lambda x, model=model: model(x).sum().backward())(batches()[0])


def quiet() -> Any:
    """What torch says of the graphs that hooks break."""
    return warnings.catch_warnings(action="ignore")


def refused() -> Any:
    return pytest.raises(fd.ConfigError, match="compiled autograd runs the backward pass")
