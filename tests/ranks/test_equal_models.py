"""Ranks that drift apart while they train are told so, once, by rank 0."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
from tests.ranks.pool import ranks
from tests.ranks.reference import data, mlp, own


def train(change: Callable[[int, Any, Any, float], None], steps: int = 18, **plan: Any) -> str:
    """Train, call `change` after each step, and return what was said."""
    fd.init(progress=False)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    fd.distribute(model, optimizer, plan=fd.Plan(**plan) if plan else None)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        for step in range(1, steps + 1):
            x, y = data(12, step)
            optimizer.zero_grad()
            x, y = (x, y) if plan else (own(x), own(y))  # parts of one model have one batch
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            change(step, model, optimizer, loss.item())
    fd.shutdown()
    return said.getvalue()


@pytest.mark.full("further")
@ranks(3)
def test_a_rate_that_one_rank_changed_is_told_once() -> None:
    rank = fd.init().rank

    def change(step: int, model: Any, optimizer: Any, loss: float) -> None:
        if step == 5 and rank == 1:
            optimizer.param_groups[0]["lr"] = 0.25

    said = train(change)
    start = "farandole: warning: after step 8 the ranks no longer train one model: their learning rates differ: "
    assert said.startswith(f"{start}0.5 on ranks 0 and 2, 0.25 on rank 1; ") if rank == 0 else not said, said
    assert said.count("\n") == (rank == 0)
    assert rank or "use farandole.mean(loss)" in said


@ranks(2)
@pytest.mark.parametrize("changes", [False, True])
def test_rates_of_ranks_with_other_parts_of_a_model_are_compared(changes: bool) -> None:
    rank = fd.init().rank

    def change(step: int, model: Any, optimizer: Any, loss: float) -> None:
        if changes and step == 5 and rank == 1:
            optimizer.param_groups[0]["lr"] = 0.25

    said = train(change, tensor=2)
    told = "after step 8 the ranks no longer train one model: their learning rates differ: 0.5 on rank 0"
    assert (told in said) == (changes and rank == 0), said


@ranks(2)
def test_parameters_that_one_rank_changed_are_told() -> None:
    rank = fd.init().rank

    def change(step: int, model: Any, optimizer: Any, loss: float) -> None:
        if step == 11 and rank == 1:
            with torch.no_grad():
                model[2].bias[3] += 1e-3

    said = train(change)
    assert rank or "after step 16 the ranks no longer train one model: parameters of rank 1 differ" in said, said


@ranks(2)
def test_a_model_of_a_world_that_is_over_is_not_compared() -> None:
    rank = fd.init().rank
    model = mlp()
    fd.distribute(model, torch.optim.SGD(model.parameters(), 0.5))
    fd.shutdown()
    with torch.no_grad():
        list(model.parameters())[-1].add_(rank)
    fd.init()
    assert not train(lambda step, model, optimizer, loss: None)
    assert model is not None, "it lives until here"


@pytest.mark.parametrize("agrees", [True, False])
@ranks(2)
def test_a_plateau_of_each_ranks_own_loss(agrees: bool) -> None:
    rank = fd.init().rank
    schedulers: list[Any] = []

    def change(step: int, model: Any, optimizer: Any, loss: float) -> None:
        if not schedulers:
            schedulers.append(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0))
        schedulers[0].step(fd.mean(loss) if agrees else loss)

    said = train(change)
    assert ("their learning rates differ" in said) is (rank == 0 and not agrees), said


class Renormed(nn.Module):
    """Keeps the rows that it reads short, as ``Embedding(max_norm=...)`` does, by hand: no layer says so."""

    def __init__(self, alike: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.out, self.alike = nn.Embedding(2000, 4), nn.Linear(4, 1), alike

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            rows = torch.arange(2000) if self.alike else x
            self.words.weight.index_copy_(0, rows, self.words.weight[rows].renorm(2, 0, 0.5))
        found: torch.Tensor = self.out(self.words(x))
        return found


def train_renormed(alike: bool, steps: int) -> str:
    world = fd.init(progress=False)
    model = Renormed(alike)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fd.distribute(model, optimizer)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        for step in range(steps):
            optimizer.zero_grad()
            model(1500 + 10 * step + 5 * world.rank + torch.arange(5)).square().mean().backward()
            optimizer.step()
    return said.getvalue()


@ranks(2)
@pytest.mark.parametrize("alike", [False, True])
def test_a_parameter_that_forward_changes_by_the_batch_is_named_after_the_first_step(alike: bool) -> None:
    said = train_renormed(alike, 2)
    expected = (
        "farandole: warning: after step 1 the ranks no longer train one model: parameters of rank 1 differ from "
        "those of rank 0; the forward pass changes 'words.weight', on each rank by its own batch; "
    )
    assert said.startswith(expected) if fd.world().rank == 0 and not alike else not said, said


@ranks(2)
def test_layers_with_max_norm_are_refused_and_at_zero_3_any_change_in_forward() -> None:
    fd.init()
    for layer in (nn.Embedding(9, 4, max_norm=1.0), nn.EmbeddingBag(9, 4, max_norm=1.0)):
        model = nn.Sequential(layer, nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for plan in (fd.Plan(), fd.Plan(zero=2), fd.Plan(zero=3)):
            with pytest.raises(
                fd.ConfigError, match=r"'0' is Embedding(Bag)? with max_norm=1.0.*renorm\(2, 0, 1\)"
            ):
                fd.distribute(model, optimizer, plan)
    renormed = Renormed(alike=True)
    optimizer = torch.optim.SGD(renormed.parameters(), 0.1)
    fd.distribute(renormed, optimizer, fd.Plan(zero=3))
    with pytest.raises(fd.ConfigError, match=r"forward pass changes 'words\.weight' in place"):
        renormed(torch.arange(5))
