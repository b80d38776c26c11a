"""The step benchmark's precisions: each really computes in it, and trains."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from farandole.bench import step_worker as worker
from farandole.bench.step import PRECISIONS
from farandole.bench.step_worker import Contender
from farandole.comm.world.world import World

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


def test_contenders_drop_out_the_same_in_a_round_and_something_else_in_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else their losses would differ by chance, which reads as if a codec had cost or gained something."""

    def contender() -> Contender:
        model = nn.Sequential(nn.Linear(64, 64), nn.Dropout())
        return Contender(
            "none", model, torch.optim.SGD(model.parameters(), lr=0.0), lambda model: model(torch.ones(64)).sum()
        )

    one = contender()
    other = contender()
    other.model.load_state_dict(one.model.state_dict())
    world = World(0, 1, 0, 1, 0, 1, "host", None, torch.device("cpu"), "alone", 60.0)
    monkeypatch.setattr("farandole.bench.step_worker.dist.barrier", lambda: None)
    rows = worker._train({"one": one, "other": other}, 1, 3, world, loopback=True)
    first, second = rows[:, :, 3].tolist()
    assert first == second
    assert len(set(first)) == 3
