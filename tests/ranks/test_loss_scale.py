"""A `GradScaler` that changes its scale: what codecs have not sent yet goes on meaning the same gradient."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import farandole as fd
from tests.ranks.pool import ranks

SCALES = (256.0, 512.0, 1024.0, 512.0, 64.0, 64.0)


@pytest.mark.gate_cases("powersgd:2")
@pytest.mark.parametrize("codec", ["int8", "topk:0.1", "sign", "powersgd:2"])
@ranks(2)
def test_what_is_applied_and_what_is_left_add_up(codec: str) -> None:
    world = fd.init()
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    fd.distribute(model, optimizer, fd.Plan(codec=codec, route="flat"))
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALES[0])
    generator = torch.Generator().manual_seed(world.rank)
    asked, applied = torch.zeros(64, 64), torch.zeros(64, 64)
    for scale in SCALES:
        wanted = torch.randn(64, 64, generator=generator)
        optimizer.zero_grad()
        scaler.scale((model.weight * wanted).sum()).backward()
        scaler.unscale_(optimizer)
        assert model.weight.grad is not None
        applied += model.weight.grad
        asked += wanted
        scaler.step(optimizer)
        after = SCALES[SCALES.index(scale) + 1] if scale != SCALES[-1] else scale
        scaler.update(after)
    dist.all_reduce(asked, group=world.group)
    left = fd.exchange_state(model)["parameters"]["weight"]["elements"]["residual"] / SCALES[-1]
    dist.all_reduce(left, group=world.group)
    torch.testing.assert_close(applied + left / 2, asked / 2, rtol=1e-4, atol=1e-4)
