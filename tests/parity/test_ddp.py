"""Beside stock `DistributedDataParallel`: the same weights, bit for bit where a sum has one order only.

The sum of two ranks has no order, and a mean of two is exact in binary. So two ranks must give the bits DDP gives.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import farandole as fd
from farandole.bench.models import LanguageModel
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_same_bits, own

STEPS = 6
Route = Literal["flat", "shared"]
Loss = Callable[[nn.Module, int], torch.Tensor]
"""Of a model and the number of a backward pass, on this rank's part of the batch."""
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-2),
}


@dataclass(frozen=True)
class Recipe:
    """A training that both do."""

    optimizer: str = "sgd"
    accumulate: int = 1
    clip_norm: float | None = None
    unused: bool = False
    """Whether some parameters get no gradient."""


def train_both(model: nn.Module, loss_of: Loss, recipe: Recipe, plan: fd.Plan) -> tuple[nn.Module, nn.Module]:
    """Train `model` with Farandole and a copy of it with DDP; return both, unwrapped."""
    stock = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=recipe.unused)
    ours, theirs = (OPTIMIZERS[recipe.optimizer](m.parameters()) for m in (model, stock))
    fd.distribute(model, ours, plan)
    before = copy.deepcopy(model.state_dict())
    for step in range(STEPS):
        for network, optimizer in ((model, ours), (stock, theirs)):
            optimizer.zero_grad()
            for micro in range(recipe.accumulate):
                silent = network is stock and micro + 1 < recipe.accumulate
                with stock.no_sync() if silent else contextlib.nullcontext():
                    (loss_of(network, step * recipe.accumulate + micro) / recipe.accumulate).backward()
            if recipe.clip_norm is not None:
                nn.utils.clip_grad_norm_(network.parameters(), recipe.clip_norm)
            optimizer.step()
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items()), "it trained"
    theirs_alone: nn.Module = stock.module
    return model, theirs_alone


def assert_equal_weights(mine: nn.Module, other: nn.Module) -> None:
    for (name, ours), theirs in zip(mine.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs), f"{name}: up to {(ours - theirs).abs().max():.1e} apart"


class Layers(nn.Module):
    """Linear layers, each of a dtype of its own."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.dtypes = dtypes
        self.layers = nn.ModuleList(nn.Linear(24, 24, dtype=dtype) for dtype in dtypes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, dtype in zip(self.layers, self.dtypes, strict=True):
            x = torch.tanh(layer(x.to(dtype)))
        return x


class Branches(nn.Module):
    """Layers of which one is used on some passes, one on some passes by rank 0 alone, and one never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.always, self.sometimes, self.on_rank_0, self.never = (nn.Linear(24, 24) for _ in range(4))
        self.norm = nn.BatchNorm1d(24)

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        x = torch.tanh(self.norm(self.always(x)))
        if number % 2 == 1:
            x = self.sometimes(x)
        if number % 3 == 1 and fd.world().rank == 0:
            x = self.on_rank_0(x)
        return x


def square_loss(model: nn.Module, number: int) -> torch.Tensor:
    x = own(torch.randn(12, 24, generator=torch.Generator().manual_seed(number)))
    y = model(x, number) if isinstance(getattr(model, "module", model), Branches) else model(x)
    loss: torch.Tensor = (y.float() - x.roll(1, 1)).square().mean()
    return loss


def language_loss(model: nn.Module, number: int) -> torch.Tensor:
    tokens = own(torch.randint(0, 256, (12, 17), generator=torch.Generator().manual_seed(number)))
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def language_model() -> nn.Module:
    torch.manual_seed(0)
    return LanguageModel(width=32, depth=2, heads=4, context=16)


@pytest.mark.gate_cases("shared-sgd")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("route", ["flat", "shared"])
@ranks(2)
def test_weights_of_a_language_model_are_those_of_ddp(route: Route, optimizer: str) -> None:
    fd.init()
    plan = fd.Plan(route=route, bucket_bytes=65536)  # several buckets
    mine, other = train_both(language_model(), language_loss, Recipe(optimizer), plan)
    assert_equal_weights(mine, other)
    assert_same_bits(mine)


@pytest.mark.gate_cases("flat-float64-float64")
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.float64, torch.bfloat16),
    ],
    ids=lambda dtypes: "-".join(str(dtype).removeprefix("torch.") for dtype in dtypes),
)
@pytest.mark.parametrize("route", ["flat", "shared"])
@ranks(2)
def test_weights_of_any_dtype_are_those_of_ddp(route: Route, dtypes: tuple[torch.dtype, ...]) -> None:
    fd.init()
    assert_equal_weights(*train_both(Layers(*dtypes), square_loss, Recipe(), fd.Plan(route=route)))


@pytest.mark.gate_cases("flat-adamw")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("route", ["flat", "shared"])
@ranks(2)
def test_accumulated_and_clipped_gradients_are_those_of_ddp(route: Route, optimizer: str) -> None:
    """DDP with `no_sync` around all backward passes of a step but the last."""
    fd.init()
    recipe = Recipe(optimizer, accumulate=3, clip_norm=0.5)
    mine, other = train_both(language_model(), language_loss, recipe, fd.Plan(route=route, accumulate=3))
    assert_equal_weights(mine, other)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("route", ["flat", "shared"])
@ranks(2)
def test_unused_parameters_are_those_of_ddp(route: Route, optimizer: str) -> None:
    """DDP with `find_unused_parameters`."""
    fd.init()
    model = Branches()
    never = model.never.weight.clone()
    mine, other = train_both(model, square_loss, Recipe(optimizer, unused=True), fd.Plan(route=route))
    assert_equal_weights(mine, other)
    assert torch.equal(model.never.weight, never), "no decay of what has no gradient"


@pytest.mark.gate_cases("flat")
@pytest.mark.parametrize("route", ["flat", "shared"])
@ranks(3)
def test_weights_of_three_ranks_are_those_of_ddp_within_rounding(route: Route) -> None:
    """A sum of three depends on its order: weights were up to 2e-8 apart after these steps."""
    fd.init()
    mine, other = train_both(language_model(), language_loss, Recipe(), fd.Plan(route=route))
    for (name, ours), theirs in zip(mine.named_parameters(), other.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-7), (
            f"{name}: {(ours - theirs).abs().max():.1e} apart"
        )
    assert_same_bits(mine)
