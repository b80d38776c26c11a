"""Several distributed models in one backward pass, in whatever order the graphs of the ranks run."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.core.vocabulary.spec import RouteName
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_close, assert_same_bits, data, mlp, own


class Partly(nn.Module):
    """One of its layers is not used, so its buckets wait for the end of the pass."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.used = mlp(seed)
        self.spare = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.used(x)
        return out


@pytest.mark.gate_cases("shared")
@pytest.mark.parametrize("route", ["shared", "flat"])
@ranks(2)
def test_graphs_that_differ_in_order(route: RouteName) -> None:
    world = fd.init()
    pair = [Partly(1), Partly(2)]
    joint = copy.deepcopy(pair)
    mine = [torch.optim.SGD(m.parameters(), 0.1) for m in pair]
    other = [torch.optim.SGD(m.parameters(), 0.1) for m in joint]
    for model, optimizer in zip(pair, mine, strict=True):
        fd.distribute(model, optimizer, fd.Plan(route=route))
    for step in range(4):
        x, y = data(8, step)
        for models, steps, a, b in ((pair, mine, own(x), own(y)), (joint, other, x, y)):
            for each in steps:
                each.zero_grad()
            order = [1, 0] if world.rank == 1 else [0, 1]
            losses = [nn.functional.mse_loss(models[i](a), b) for i in order]
            (losses[0] + losses[1]).backward()
            for each in steps:
                each.step()
    for model, alone in zip(pair, joint, strict=True):
        assert_close(model, alone)
        assert_same_bits(model)
