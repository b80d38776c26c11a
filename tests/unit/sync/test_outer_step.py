"""The outer step by itself: torch's optimizers and closed forms as references."""

from __future__ import annotations

import pytest
import torch

from farandole.core.vocabulary.sync_spec import SyncSpec
from farandole.sync.meetings import outer_step


@pytest.mark.parametrize("text", ["local", "diloco", "diloco:nesterov=false", "local:outer_lr=0.3,momentum=0.5"])
def test_it_is_torchs_sgd_with_the_change_for_a_gradient(text: str) -> None:
    spec = SyncSpec.parse(text)
    draw = torch.Generator().manual_seed(3)
    outer = [torch.randn(4, 3, generator=draw, dtype=torch.float64), torch.randn(5, generator=draw).double()]
    reference = [torch.nn.Parameter(each.clone()) for each in outer]
    nesterov = spec.nesterov and spec.momentum > 0
    optimizer = torch.optim.SGD(reference, spec.outer_lr, spec.momentum, nesterov=nesterov)
    velocity = [torch.zeros_like(each) for each in outer] if spec.momentum else []
    for _ in range(7):
        change = [torch.randn(each.shape, generator=draw, dtype=torch.float64) for each in outer]
        for parameter, each in zip(reference, change, strict=True):
            parameter.grad = each.clone()
        optimizer.step()
        outer_step(outer, velocity, change, spec)
    for each, parameter in zip(outer, reference, strict=True):
        torch.testing.assert_close(each, parameter.detach(), rtol=1e-12, atol=1e-12)


def test_equal_changes_move_by_the_closed_form() -> None:
    spec, change, rounds = SyncSpec.parse("diloco"), 0.25, 20
    outer, velocity = [torch.zeros(1, dtype=torch.float64)], [torch.zeros(1, dtype=torch.float64)]
    for _ in range(rounds):
        outer_step(outer, velocity, [torch.full((1,), change, dtype=torch.float64)], spec)
    mu, rate = spec.momentum, spec.outer_lr
    moved = change * rate * sum(1 + mu * (1 - mu**j) / (1 - mu) for j in range(1, rounds + 1))
    assert outer[0].item() == pytest.approx(-moved, rel=1e-12)


def test_nothing_moves_where_there_is_nothing() -> None:
    outer_step([], [], [], SyncSpec.parse("diloco"))
