"""Codecs on a simulated accelerator beside degrees that divide the model: the bits of the CPU, and no race."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.comm.engine.coded_bucket import DeviceCodedBucket
from farandole.parallel.model import DistributedModel
from tests.ranks.pool import ranks
from tests.ranks.test_device_engine import WIDTH, simulated, state_of


class Residual(nn.Module):
    """Two pairs of matrices that can be split, and cut between."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, WIDTH)."""
        for block in self.blocks:
            x = x + block(x)
        return x


def trained(plan: fd.Plan, data_rank: int) -> nn.Module:
    torch.manual_seed(1)
    model = Residual()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    fd.distribute(model, optimizer, plan)
    for step in range(4):
        torch.manual_seed(100 * step + data_rank)
        x = torch.randn(8, WIDTH)
        optimizer.zero_grad()
        fd.step(model, nn.functional.mse_loss, (x,), x.flip(1))
        optimizer.step()
    return model


@pytest.mark.parametrize(
    "codec", ["int8", pytest.param("topk:0.02,exact=true", marks=pytest.mark.full("further"))]
)
@pytest.mark.parametrize(
    "degrees",
    [{"tensor": 2}, {"pipeline": 2, "micro_batches": 2}],
    ids=["tensor", "pipeline"],
)
@ranks(4)
def test_data_ranks_of_a_divided_model(degrees: dict[str, Any], codec: str) -> None:
    rank = fd.init().rank
    data_rank = rank // 2 if "tensor" in degrees else rank % 2
    plan = fd.Plan(codec=codec, route="flat", bucket_bytes=16384, first_bucket_bytes=1024, **degrees)
    expected = state_of(trained(plan, data_rank))
    with simulated():
        model = trained(plan, data_rank)
        reducer = DistributedModel.of(model).reducer
        assert reducer is not None
        assert any(isinstance(each, DeviceCodedBucket) for each in reducer.buckets.buckets)
        found = state_of(model)
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
