"""Ranks that train on the same samples are told so, once, by rank 0."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import farandole as fd
from farandole.parallel.instrument import phase_hooks
from tests.ranks.pool import ranks
from tests.ranks.reference import data, mlp


def said_while_training(loader: Any, steps: int = 3, *, first: Any = None, plan: fd.Plan | None = None) -> str:
    fd.init(progress=False)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fd.distribute(model, optimizer, plan)
    heard = io.StringIO()
    with redirect_stderr(heard):
        if first is not None:
            model(first)
        for _, (x, y) in zip(range(steps), loader, strict=False):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return heard.getvalue()


@ranks(3)
def test_a_loader_that_was_not_divided_is_named_once() -> None:
    world = fd.init(progress=False)
    text = said_while_training(DataLoader(TensorDataset(*data(12)), batch_size=4))
    wanted = "farandole: warning: ranks 0, 1 and 2 trained on the same first batch"
    assert text.startswith(wanted) if world.rank == 0 else not text, text
    assert text.count("\n") <= 1
    assert not phase_hooks._observers(), "nothing is looked at any more"


@pytest.mark.full("further")
@ranks(3)
def test_two_of_three_ranks_with_the_same_samples() -> None:
    world = fd.init(progress=False)
    x, y = data(12, seed=1 if world.rank == 1 else 2)
    text = said_while_training(DataLoader(TensorDataset(x, y), batch_size=4))
    assert world.rank or "warning: ranks 0 and 2 trained on the same first batch" in text


@ranks(2)
def test_divided_loaders_and_other_samples_are_not_remarked_upon() -> None:
    world = fd.init(progress=False)
    rows = TensorDataset(*data(12))
    assert not said_while_training(fd.shard(DataLoader(rows, batch_size=4, shuffle=True)))
    fd.shutdown()
    x, y = data(12, seed=world.rank)
    assert not said_while_training(DataLoader(TensorDataset(x, y), batch_size=4))
    assert sys.stderr is not None


@pytest.mark.full("further")
@ranks(4)
def test_ranks_that_divide_a_model_have_the_same_samples() -> None:
    world = fd.init(progress=False)
    rows = TensorDataset(*data(12))
    plan = fd.Plan(tensor=2, tensor_recipe={"0": "columns", "2": "rows"})
    x, y = data(12, seed=world.rank // 2)
    assert not said_while_training(DataLoader(TensorDataset(x, y), batch_size=3), plan=plan)
    fd.shutdown()
    text = said_while_training(DataLoader(rows, batch_size=3), plan=plan)
    assert world.rank or "warning: ranks 0 and 2 trained on the same first batch" in text, text


@ranks(2)
def test_a_pass_that_no_gradient_comes_back_to_is_no_training() -> None:
    world = fd.init(progress=False)
    first = data(4)[0]
    assert not said_while_training(fd.shard(DataLoader(TensorDataset(*data(12)), batch_size=4)), first=first)
    fd.shutdown()
    text = said_while_training(DataLoader(TensorDataset(*data(12)), batch_size=4), first=first)
    assert ("trained on the same first batch" in text) == (world.rank == 0)


@ranks(2)
def test_a_script_without_a_loader_is_told_of_a_seed_for_each_rank_and_that_helps() -> None:
    world = fd.init(progress=False)

    def drawn(seed: Any) -> Any:
        seed()
        while True:
            yield torch.randn(4, 6), torch.randn(4, 3)  # as nanoGPT's get_batch: no loader to divide

    text = said_while_training(drawn(lambda: torch.manual_seed(1337)))
    assert (
        world.rank or "without a loader, draw other samples on each rank: farandole.seed(1, per_rank=True)" in text
    )
    fd.shutdown()
    assert not said_while_training(drawn(lambda: fd.seed(1, per_rank=True)))
