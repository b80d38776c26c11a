"""The plan's `sync = "server"`: real server processes, beside one process that trains on the joined batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import farandole as fd
from farandole.comm.world.store_sync import all_gather_json
from farandole.parallel.apply import policy_of
from farandole.sync.server.dense.policy import ServerSync
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_close, data, mlp

STEPS, WHOLE = 12, 12
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "plain": lambda p: torch.optim.SGD(p, 0.05),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, betas=(0.8, 0.95)),
}


def batches(steps: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    x, y = (each.double() for each in data(WHOLE * steps))
    return list(zip(x.split(WHOLE), y.split(WHOLE), strict=True))


def train(
    model: nn.Module, optimizer: Optimizer, joined: list[tuple[torch.Tensor, torch.Tensor]],
    after: Callable[[int], object] = lambda step: None, *, alone: bool = False,
) -> None:  # fmt: skip
    """Train on this rank's parts of the batches, or alone on whole ones, with a schedule of the learning rate."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    rank, size = (0, 1) if alone else (fd.world().rank, fd.world().size)
    for step, (x, y) in enumerate(joined, start=1):
        nn.functional.mse_loss(model(x.chunk(size)[rank]), y.chunk(size)[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        after(step)


def distributed(sync: str, kind: str = "sgd", **keys: Any) -> tuple[nn.Sequential, Optimizer]:
    model = mlp().double()
    optimizer = OPTIMIZERS[kind](model.parameters())
    fd.distribute(model, optimizer, fd.Plan(sync=sync, **keys))
    return model, optimizer


def policy(model: nn.Module) -> ServerSync:
    found = policy_of(model)
    assert isinstance(found, ServerSync)
    return found


def bits(model: nn.Module) -> str:
    return "".join(each.detach().numpy().tobytes().hex() for each in model.parameters())


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@ranks(2, 3)
def test_whole_steps_train_as_one_process(kind: str) -> None:
    world = fd.init()
    model, optimizer = distributed(f"server:staleness=0,servers={world.size - 1}", kind)
    train(model, optimizer, batches())
    assert not optimizer.state
    alone = mlp().double()
    train(alone, OPTIMIZERS[kind](alone.parameters()), batches(), alone=True)
    assert_close(model, alone, rtol=1e-10, atol=1e-12)
    assert len(set(all_gather_json(world, "bits", bits(model)))) == 1
    with fd.averaged(model):
        assert_close(model, alone, rtol=1e-10, atol=1e-12)
