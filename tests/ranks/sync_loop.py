"""A loop over joined batches, as ranks with a plan's `sync` and one process run it, and its optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import farandole as fd
from tests.ranks.reference import data, mlp

WHOLE = 12
MakeOptimizer = Callable[[Any], Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "plain": lambda p: torch.optim.SGD(p, 0.05, weight_decay=0.01),
    "bare": lambda p: torch.optim.SGD(p, 0.05),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, betas=(0.8, 0.95)),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.05),
}


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return joined batches, of samples of their own each."""
    x, y = (each.double() for each in data(WHOLE * steps))
    return list(zip(x.split(WHOLE), y.split(WHOLE), strict=True))


def train(
    model: nn.Module, optimizer: Optimizer, joined: list[tuple[torch.Tensor, torch.Tensor]],
    after: Callable[[int], object] = lambda step: None, *, decay: float = 1.0, alone: bool = False,
) -> None:  # fmt: skip
    """Train on this rank's parts of the batches, or alone on whole ones. `decay`: of the rate, by step."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    rank, size = (0, 1) if alone else (fd.world().rank, fd.world().size)
    for step, (x, y) in enumerate(joined, start=1):
        nn.functional.mse_loss(model(x.chunk(size)[rank]), y.chunk(size)[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        after(step)


def distributed(sync: str, kind: str = "sgd", **keys: Any) -> tuple[nn.Sequential, Optimizer]:
    """Return a model with a plan's `sync`, and its optimizer."""
    model = mlp().double()
    optimizer = OPTIMIZERS[kind](model.parameters())
    fd.distribute(model, optimizer, fd.Plan(sync=sync, **keys))
    return model, optimizer
