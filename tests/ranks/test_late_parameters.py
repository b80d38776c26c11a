"""Parameters that are frozen when the model is distributed and train later, whoever exchanges their gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import farandole as fd
from farandole.parallel.split import split_of
from tests.ranks.pool import ranks

WIDTH = 16


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mixture = fd.MixtureOfExperts(WIDTH, 8, num_experts=4, top_k=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, width)."""
        x = torch.tanh(self.first(x))
        out: torch.Tensor = self.last(x + self.mixture(x))
        return out


def train_in_phases(plan: fd.Plan, late: str, early: str) -> None:
    """Train `early` alone for two steps, and then `late` alone, with clipping in the loop, as one process does."""
    here = fd.init()
    torch.manual_seed(1)
    mine = Mixed().double()
    alone = copy.deepcopy(mine)
    for model in (mine, alone):
        for name, each in model.named_parameters():
            each.requires_grad_(name.startswith(early))
    optimizers = [torch.optim.SGD(each.parameters(), 0.5) for each in (mine, alone)]
    fd.distribute(mine, optimizers[0], plan)
    generator = torch.Generator().manual_seed(0)
    for step in range(5):
        x, y = torch.randn(2, 8, WIDTH, dtype=torch.float64, generator=generator)
        parts = slice(here.rank * 8 // here.size, (here.rank + 1) * 8 // here.size)
        norms = []
        for model, optimizer, part in ((mine, optimizers[0], parts), (alone, optimizers[1], slice(None))):
            if step == 2:
                optimizer.zero_grad()
                for name, each in model.named_parameters():
                    each.requires_grad_(name.startswith(late))
            optimizer.zero_grad()
            functional.mse_loss(model(x[part]), y[part]).backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.01)))
            optimizer.step()
        assert abs(norms[0] - norms[1]) <= 1e-10 * norms[1], f"step {step}: {norms}"
    for (name, parameter), whole in zip(mine.named_parameters(), alone.parameters(), strict=True):
        split = split_of(parameter)
        right = whole.detach() if split is None else split.take(whole.detach())
        off = float((parameter.detach() - right).abs().max())
        assert off <= 1e-10, f"{name} is off by {off}"


@pytest.mark.full("further")
@ranks(4)
def test_experts_that_train_later_are_averaged_over_replicas() -> None:
    for early, late in (("first", "mixture.experts"), ("first", ""), ("mixture.experts", "first")):
        train_in_phases(fd.Plan(expert=2, data=2), late, early)


@ranks(2)
def test_what_trains_alone_from_a_step_on_is_a_mean_when_backward_returns() -> None:
    for early, late in (("first", "last"), ("first", ""), ("last", "mixture")):
        train_in_phases(fd.Plan(), late, early)
