"""Losses that compare the samples of a batch: verify names them, `gather` makes them exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import farandole as fd
from farandole.train.verify.joined import JoinedLoss
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_close, assert_same_bits, data, mlp, own


class Encoder(nn.Module):
    """Its temperature is a parameter of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return functional.normalize(self.body(x), dim=1), self.temperature


def contrast(a: torch.Tensor, b: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Each row of `a` is to find its own among those of `b`."""
    return functional.cross_entropy(a @ b.T * temperature.exp(), torch.arange(len(a)))


def trained(step: Callable[[Any, Any, Any], torch.Tensor], batches: Any, distribute: bool) -> Encoder:
    model = Encoder().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    if distribute:
        fd.distribute(model, optimizer)
    for x, y in batches:
        optimizer.zero_grad()
        step(model, x, y).backward()
        optimizer.step()
    return model


@pytest.mark.gate_cases("1-29-True")
@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize("count", [24, 29, 25])
@ranks(1, 2, 3)
def test_a_loss_over_gathered_rows_is_that_of_one_process(count: int, weighs: bool) -> None:
    """25 samples in batches of 12: the last one has one sample, and the other ranks a placeholder."""
    world = fd.init()
    x, _ = (tensor.double() for tensor in data(count))
    batch = 12 // world.size

    def together(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        (a, temperature), (b, _) = model(x), model(y)
        both = fd.gather({"a": a, "b": b}, gradients=True)
        if weighs:
            fd.weight(1 + world.rank)  # whatever the ranks weigh
        return contrast(both["a"], both["b"], temperature)

    def alone(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return contrast(model(x)[0], model(y)[0], model.temperature)

    model = trained(together, fd.shard(DataLoader(TensorDataset(x, x + 0.1), batch_size=batch)), True)
    rows = [(x[i : i + 12], x[i : i + 12] + 0.1) for i in range(0, count, 12)]
    assert_close(model, trained(alone, rows, False), rtol=1e-9, atol=1e-11)
    assert_same_bits(model)
    assert len(model.temperature._backward_hooks or ()) <= 2, "a parameter that comes out collects no hooks"


@ranks(2)
def test_gradients_after_the_loop_or_on_one_rank_only_are_refused() -> None:
    world = fd.init()
    values = list(fd.shard(DataLoader(range(8), batch_size=2)))  # type: ignore[arg-type]
    with pytest.raises(fd.ConfigError, match="gradients=True after the loop"):
        fd.gather(torch.cat(values), gradients=True)
    with pytest.raises(fd.Mismatch, match="gradients"):
        fd.gather(torch.cat(values), gradients=world.rank == 0)
    z = torch.ones(2, requires_grad=True)
    assert not fd.gather(z).requires_grad


def gathered(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    all_a, all_b = fd.gather((a, b), gradients=True)
    return contrast(all_a, all_b, torch.tensor(0.0))


LOSSES: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], bool]] = {
    "mean of squares": (functional.mse_loss, False),
    "cross entropy": (lambda z, y: functional.cross_entropy(z, y.argmax(1), label_smoothing=0.1), False),
    "a sum": (lambda z, y: (z * y).sum(), False),
    "contrast": (lambda z, y: contrast(z, y + z, torch.tensor(0.0)), True),
    "root of the mean": (lambda z, y: functional.mse_loss(z, y).sqrt(), True),
    "Dice": (lambda z, y: 1 - 2 * (z.sigmoid() * y.abs()).sum() / (z.sigmoid().sum() + y.abs().sum()), True),
    "gathered": (lambda z, y: gathered(z, y + z), False),
}


@pytest.mark.gate_cases("root of the mean")
@pytest.mark.parametrize("name", LOSSES)
@ranks(2)
def test_a_loss_that_couples_samples_is_named(name: str) -> None:
    loss_of, couples = LOSSES[name]
    fd.init()
    gradients = []
    for looks in (True, False):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        fd.distribute(model, optimizer)
        look = JoinedLoss(fd.world()) if looks else None
        x, y = data(12)
        loss = loss_of(model(own(x)), own(y))
        if look is not None:
            look.backward_begins(loss)
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        if look is not None:
            found = [(check.word, check.answer) for check in look.checks()]
            look.stop()
            assert bool(found) is couples, found
            assert not couples or found[0][0] == "not exact"
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True)), "looking changes nothing"


class WithLoss(nn.Module):
    """As models of transformers: the loss comes out beside what it is of, and both have hooks."""

    def __init__(self, couples: bool) -> None:
        super().__init__()
        self.body, self.norm, self.couples = mlp(), nn.BatchNorm1d(3), couples

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.body(x)
        logits = self.norm(hidden)  # couples samples too, but in the model
        loss = functional.mse_loss(logits, labels)
        return {"loss": loss.sqrt() if self.couples else loss, "logits": logits, "hidden": hidden}


@pytest.mark.parametrize("couples", [False, True])
@ranks(2)
def test_a_loss_that_the_model_computes_is_looked_at(couples: bool) -> None:
    fd.init()
    model, alone = WithLoss(couples), WithLoss(couples)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fd.distribute(model, optimizer, fd.Plan(sync_batch_norm=True))
    look = JoinedLoss(fd.world())
    x, y = data(12)
    loss = model(own(x), labels=own(y))["loss"]
    look.backward_begins(loss)
    loss.backward()
    optimizer.step()
    assert bool(look.checks()) is couples
    if not couples:
        alone(x, labels=y)["loss"].backward()
        torch.optim.SGD(alone.parameters(), 0.1).step()
        assert_close(model, alone)


@ranks(2)
def test_what_cannot_be_differentiated_twice_is_left_alone() -> None:
    fd.init()
    model = mlp()
    fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
    look = JoinedLoss(fd.world())

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, z: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(z)
            return (z @ z.T).sum()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (z,) = ctx.saved_tensors
            found: torch.Tensor = gradient * 2 * z.sum(0).expand_as(z)
            return found

    loss = Once.apply(model(own(data(12)[0])))
    look.backward_begins(loss)
    loss.backward()
    assert look.checks() == []
