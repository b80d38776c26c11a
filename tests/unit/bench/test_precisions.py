"""The step benchmark's precisions: each really computes in it, and trains."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from farandole.bench.contenders import Contender
from farandole.bench.model_names import PRECISIONS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def train(precision: str, *, factor: float = 1.0) -> tuple[list[float], set[torch.dtype], nn.Module]:
    """Train a line by five steps; return the losses, what the model computed in, and the model."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    x = torch.randn(64, 8)
    y = x.sum(1, keepdim=True)
    seen: set[torch.dtype] = set()

    def loss_of(module: nn.Module) -> torch.Tensor:
        out: torch.Tensor = module(x)
        seen.add(out.dtype)
        loss: torch.Tensor = (out.float() - y).square().mean() * factor
        return loss

    contender = Contender("none", model, torch.optim.SGD(model.parameters(), lr=0.1 / factor), loss_of)
    contender.train_in(precision, "cpu")
    return [float(contender.step()) for _ in range(5)], seen, model


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_precision_is_what_the_model_computes_in(precision: str) -> None:
    exact, _, _ = train("fp32")
    losses, seen, model = train(precision)
    assert seen == {DTYPES[precision]}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert losses == pytest.approx(exact, rel=0.05)
    assert losses[-1] < 0.5 * losses[0]


def test_small_gradients_survive_16_bits() -> None:
    """Those of this loss are below the least number of float16, unless the loss is scaled."""
    losses, _, _ = train("fp16", factor=1e-7)
    assert losses[-1] < 0.5 * losses[0]
