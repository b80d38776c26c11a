"""What one process computes on the joined batch, and how near the ranks must come to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import farandole as fd
from farandole.comm.world.store_sync import all_gather_json
from farandole.train.verify.verify import fingerprint


def mlp(seed: int = 1) -> nn.Sequential:
    """Return a small model; the same for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def data(count: int, seed: int = 7, width: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs (count, width) and targets (count, 3)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator), torch.randn(count, 3, generator=generator)


def own(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's equal part of a joined batch."""
    world = fd.world()
    return tensor.chunk(world.size)[world.rank]


def train_alone(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Any],
    after_backward: Callable[[], object] = lambda: None,
) -> None:
    """Train as one process does, on batches of (inputs, targets): a plain loop, mean squared error."""
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        after_backward()
        optimizer.step()


def assert_close(mine: nn.Module, reference: nn.Module, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Parameters and buffers equal to float rounding."""
    expected = reference.state_dict()
    for name, value in mine.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=rtol, atol=atol, msg=lambda m: f"{name}: {m}")  # noqa: B023 - called at once


def assert_same_bits(model: nn.Module) -> None:
    """Every rank holds the same bits."""
    said = all_gather_json(
        fd.world(), "test/bits", {name: fingerprint(t) for name, t in model.state_dict().items()}
    )
    assert all(other == said[0] for other in said), f"ranks differ: {said}"
