"""Keys of the plan together: sharded states with recomputation, precision, frozen weights and schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import farandole as fd
from tests.ranks.pool import ranks, takes


class Block(nn.Module):
    """A residual block with dropout: what is computed again must draw the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1))
        self.out = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From (batch, 16) to (batch, 16)."""
        result: torch.Tensor = x + self.out(self.inside(x))
        return result


def train(plan: fd.Plan, *, frozen: bool = False) -> dict[str, torch.Tensor]:
    """Train four steps with a plan, and return the whole parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), Block(), Block(), nn.Linear(16, 4))
    if frozen:
        model[1].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    fd.distribute(model, optimizer, plan)
    rank = fd.world().rank
    for step in range(4):
        torch.manual_seed(100 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(6, 8)).square().mean().backward()
        optimizer.step()
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in model.state_dict().items()
    }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().float().clone()


@pytest.mark.gate_cases("bf16-1")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("keys", "frozen"),
    [
        ({"recompute": "blocks"}, False),
        ({"recompute": ("1.inside", "2")}, False),
        ({"precision": "bf16"}, False),
        ({"precision": "bf16", "recompute": "blocks", "clip_norm": 0.1}, False),
        ({"train_schedule": {"0": "3.*", "2": "*"}}, False),
        ({"frozen_codec": "int8"}, True),
        ({"frozen_codec": "int4", "recompute": "blocks", "precision": "bf16"}, True),
    ],
    ids=["recompute", "patterns", "bf16", "bf16 recompute clip", "schedule", "frozen int8", "frozen int4 and all"],
)
@ranks(2)
@takes(60)
def test_shards_change_nothing_else(stage: int, keys: dict[str, Any], frozen: bool) -> None:
    fd.init()
    expected = train(fd.Plan(**keys), frozen=frozen)
    found = train(fd.Plan(zero=stage, **keys), frozen=frozen)
    assert found.keys() == expected.keys(), f"names {sorted(found)}"
    tolerance = 2e-3 if keys.get("precision") == "bf16" else 2e-5
    for name, value in expected.items():
        torch.testing.assert_close(
            whole(found[name]),
            whole(value),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m: f"{name}: {m}",  # noqa: B023
        )
