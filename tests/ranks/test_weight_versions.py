"""Pipelines without a flush (PipeDream-2BW) train as one process does whose gradients come one step late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.core.vocabulary.errors import ConfigError, Mismatch, PlanError
from farandole.core.vocabulary.spec import Plan
from farandole.parallel.pipeline import without_flush
from tests.ranks.pool import ranks, takes

MSE = nn.functional.mse_loss
EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}
Batch = tuple[torch.Tensor, torch.Tensor]


class DelayedReference:
    """One process: W(t + 1) = W(t) - update by the gradient of batch t - 1 at W(t - 1)."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, parts: int, clip_norm: float | None = None
    ) -> None:
        self._model, self._optimizer, self._parts, self._clip_norm = model, optimizer, parts, clip_norm
        self._trained = [each for each in model.parameters() if each.requires_grad]
        self._late: list[torch.Tensor] = []

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Compute the gradient of a batch, then update by that of the one before."""
        pieces = zip(x.chunk(self._parts), y.chunk(self._parts), strict=True)
        loss = torch.stack([MSE(self._model(inputs), targets) for inputs, targets in pieces]).mean()
        gradients = torch.autograd.grad(loss, self._trained)
        self.update()
        self._late = list(gradients)
        return loss.detach()

    def update(self) -> None:
        """Update by the late gradient, if there is one."""
        if not self._late:
            return
        for parameter, gradient in zip(self._trained, self._late, strict=True):
            parameter.grad = gradient
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._trained, self._clip_norm)
        self._optimizer.step()
        self._late = []


def chain() -> nn.Module:
    parts: list[nn.Module] = []
    for _ in range(8):
        parts += [nn.Linear(6, 6), nn.Tanh()]
    return nn.Sequential(*parts, nn.Linear(6, 3))


def with_norms() -> nn.Module:
    parts: list[nn.Module] = []
    for _ in range(5):
        parts += [nn.Sequential(nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6)), nn.ReLU(inplace=True)]
    return nn.Sequential(*parts, nn.Linear(6, 3))


class Recurrent(nn.Module):
    """Its GRU keeps a list of its weights beside its attributes. One layer is frozen, one weight is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rnn, self.frozen = nn.Linear(6, 6), nn.GRU(6, 6, batch_first=True), nn.Linear(6, 6)
        self.twice, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.rnn(self.first(x).unsqueeze(1))
        hidden = torch.tanh(self.frozen(hidden.squeeze(1)))
        output: torch.Tensor = self.last(self.twice(torch.tanh(self.twice(hidden))))
        return output


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return make().double()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def batches(count: int, samples: int = 16) -> Iterator[Batch]:
    torch.manual_seed(3)
    for _ in range(count):
        yield torch.randn(samples, 6, dtype=torch.float64), torch.randn(samples, 3, dtype=torch.float64)


def assert_same(reference: nn.Module, model: nn.Module, what: str) -> None:
    theirs, here = dict(reference.named_parameters()), 0
    for name, parameter in model.named_parameters():
        if parameter.shape == theirs[name].shape:
            here += 1
            torch.testing.assert_close(parameter, theirs[name], **EXACT, msg=f"{what}: {name}")
    assert 0 < here < len(theirs), f"{what}: this rank has {here} of {len(theirs)} parameters"


def follow(
    make: Callable[[], nn.Module],
    kind: Callable[[nn.Module], torch.optim.Optimizer],
    plan: Plan,
    own: Callable[[int], slice],
    parts: int = 1,
) -> None:
    """Train as `DelayedReference` does; compare after each step, and after two drains.

    `own`: this rank's samples of a batch, by its number. `parts`: micro-batches of the reference.
    """
    what = f"{make.__name__}, {kind.__name__}, {plan.pipeline} x {plan.micro_batches}"
    reference, model = made(make), made(make)
    plain = DelayedReference(reference, kind(reference), parts, plan.clip_norm)
    optimizer = kind(model)
    fd.distribute(model, optimizer, plan)
    share, losses = fd.world().session.batch_weight, []
    for number, (x, y) in enumerate(batches(6)):
        mine = x[own(number)], y[own(number)]
        share.set(len(mine[0]) * fd.world().sample_size / len(x))
        optimizer.zero_grad(set_to_none=number != 2)
        losses.append((fd.step(model, MSE, *mine), plain.step(x, y)))
        trained = [each for each in model.parameters() if each.numel() and each.requires_grad]
        assert [each.grad is None for each in trained] == [number in (0, 4)] * len(trained), f"{what}, {number}"
        optimizer.step()
        assert_same(reference, model, f"{what}, step {number}")
        if number == 3:  # in the middle of a run, as before a checkpoint
            optimizer.zero_grad()
            assert fd.drain(model), what
            assert not fd.drain(model), what
            optimizer.step()
            plain.update()
            assert_same(reference, model, f"{what}, drained")
    for loss, expected in losses:
        torch.testing.assert_close(loss, expected, **EXACT, msg=f"{what}: loss")
    optimizer.zero_grad()
    assert fd.drain(model)
    optimizer.step()
    plain.update()
    assert_same(reference, model, f"{what}, end")
    share.set(1.0)


def everything(_: int) -> slice:
    return slice(None)


@pytest.mark.gate_cases("2")
@ranks(2, 4)
@takes(60)
def test_weights_are_those_of_gradients_that_come_one_step_late() -> None:
    size = fd.init().size
    for kind in (sgd, adam):
        follow(chain, kind, Plan(pipeline=size, weight_versions=2, micro_batches=4), everything)
        follow(chain, kind, Plan(pipeline=size, weight_versions=2, micro_batches=8, clip_norm=0.1), everything)
    again = Plan(pipeline=size, weight_versions=2, micro_batches=4, recompute=("*",))
    follow(chain, sgd, again, everything)
    follow(with_norms, sgd, Plan(pipeline=size, weight_versions=2, micro_batches=4), everything, parts=4)
    if size == 2:
        follow(Recurrent, adam, Plan(pipeline=2, weight_versions=2, micro_batches=2), everything)


@pytest.mark.full("slow")
@ranks(4)
@takes(60)
def test_replicas_exchange_the_gradients_of_the_batch_that_has_ended() -> None:
    here = fd.init()
    plan = Plan(pipeline=2, data=2, weight_versions=2, micro_batches=4)

    def unequal(number: int) -> slice:
        """4 samples on one replica and 12 on the other, in turn: gradients have the weight of their own batch."""
        is_first = here.sample_rank == 0
        cut = 4 if number % 2 == 0 else 12
        return slice(0, cut) if is_first else slice(cut, None)

    for kind in (sgd, adam):
        follow(chain, kind, plan, lambda _: slice(8 * here.sample_rank, 8 * here.sample_rank + 8))
        follow(chain, kind, plan, unequal)


@ranks(4)
def test_bf16_passes_and_codecs_go_the_same_way() -> None:
    """Roughly: a batch whose gradient were lost, or another one's, would be far off after six steps."""
    here = fd.init()
    for keys in ({"precision": "bf16"}, {"codec": "fp16"}):
        reference, model = made(chain).float(), made(chain).float()
        plain, optimizer = DelayedReference(reference, sgd(reference), 1), sgd(model)
        plan = Plan.from_mapping(
            {"pipeline": 2, "data": 2, "weight_versions": 2, "micro_batches": 4, **keys}, where="test"
        )
        fd.distribute(model, optimizer, plan)
        before = made(chain).float()
        for x, y in [(x.float(), y.float()) for x, y in batches(6)]:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled="precision" in keys):
                expected = plain.step(x, y)
            mine = slice(8 * here.sample_rank, 8 * here.sample_rank + 8)
            loss = fd.step(model, MSE, x[mine], y[mine])
            optimizer.step()
            torch.testing.assert_close(loss, expected.float(), rtol=0.02, atol=0)
        for name, parameter in model.named_parameters():
            if parameter.numel():
                theirs = reference.get_parameter(name)
                moved = (theirs - before.get_parameter(name)).norm()
                assert (parameter - theirs).norm() < 0.05 * moved, f"{keys}: {name}"


@ranks(2)
def test_an_evaluation_between_steps_has_the_newest_weights_and_counts_decide() -> None:
    fd.init()
    reference, model = made(chain), made(chain)
    plain, optimizer = DelayedReference(reference, sgd(reference), 1), sgd(model)
    fd.distribute(model, optimizer, Plan(pipeline=2, weight_versions=2, micro_batches=4))
    for x, y in batches(4):
        optimizer.zero_grad()
        fd.step(model, MSE, x, y, count=len), plain.step(x, y)
        optimizer.step()
        with torch.no_grad():
            expected = MSE(reference(x[:6]), y[:6])
        torch.testing.assert_close(fd.evaluate(model, MSE, x[:6], y[:6]), expected, **EXACT)
        assert_same(reference, model, "with evaluations")


def test_a_checkpoint_has_all_gradients_or_is_refused(tmp_path: Path) -> None:
    _save_and_load(folder=str(tmp_path))


@ranks(2)
def _save_and_load(folder: str) -> None:
    fd.init()
    model, x, y = made(chain), *next(batches(1))
    optimizer = sgd(model)
    fd.distribute(model, optimizer, Plan(pipeline=2, weight_versions=2, micro_batches=4))
    fd.step(model, MSE, x, y)
    optimizer.step()
    for call in (lambda: fd.save(folder, model, optimizer, step=1), lambda: fd.load(folder, model, optimizer)):
        with pytest.raises(ConfigError, match=r"fd.drain|farandole.drain\(model\) and optimizer.step"):
            call()
    assert fd.drain(model)
    optimizer.step()
    fd.save(folder, model, optimizer, step=1)
    before = [each.detach().clone() for each in model.parameters()]
    fd.step(model, MSE, x, y)
    optimizer.step()
    fd.drain(model)
    optimizer.step()
    assert fd.load(folder, model, optimizer) == 1
    assert all(map(torch.equal, before, model.parameters()))


class Stashing(nn.Module):
    """Computes with a parameter that it keeps in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.kept = [self.linear.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.linear(x), self.kept[0])


class TiedEnds(nn.Module):
    """The first layer's weight is the last one's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])
        self.layers[3].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(x)
        return output


@ranks(2)
def test_what_is_not_there_is_refused_on_every_rank() -> None:
    here = fd.init()
    x, y = next(batches(1))

    def start(model: nn.Module, **keys: Any) -> nn.Module:
        fd.distribute(model, sgd(model), Plan(**{"pipeline": 2, "weight_versions": 2, "micro_batches": 4, **keys}))
        return model

    def refused(kind: type[Exception], message: str, run: Callable[[], Any]) -> None:
        with pytest.raises(kind, match=message):
            run()

    refused(PlanError, "weight_versions = 2 with zero = 1", lambda: start(made(chain), zero=1))
    refused(
        PlanError, "weight_versions = 2 with sync_batch_norm", lambda: start(made(chain), sync_batch_norm=True)
    )
    refused(PlanError, 'weight_versions = 2 with codec = "auto"', lambda: start(made(chain), codec="auto"))
    hooked = made(chain)
    next(hooked.parameters()).register_hook(lambda gradient: gradient)
    refused(ConfigError, "has hooks on its gradient", lambda: start(hooked))
    tied = start(made(TiedEnds))
    refused(PlanError, "layers.0.weight.*which two ranks", lambda: fd.step(tied, MSE, x, x))
    model = start(made(chain))
    with fd.accumulate():
        refused(ConfigError, "held back", lambda: fd.step(model, MSE, x, y))
    refused(ConfigError, "balance", lambda: fd.step(model, MSE, x, y, balance=0.1))
    fd.step(model, MSE, x, y), fd.step(model, MSE, x, y)
    layers = made(lambda: nn.Sequential(Stashing(), nn.Tanh(), Stashing(), nn.Linear(6, 3)))
    stashing = start(layers, pipeline_cuts=["2"])  # each stage has one: where times decide, the last may have none
    refused(ConfigError, "not by its module's attribute", lambda: fd.step(stashing, MSE, x, y))
    refused(ConfigError, "ended in an exception", lambda: fd.step(stashing, MSE, x, y))
    mine = x + here.rank
    refused(Mismatch, "the samples of the batch", lambda: fd.step(model, MSE, mine, y))
    refused(ConfigError, "ended in an exception", lambda: fd.drain(model))


@pytest.mark.full("further")
@ranks(2)
def test_what_one_stage_refuses_is_refused_by_both() -> None:
    fd.init()
    x, y = next(batches(1))
    model = made(lambda: nn.Sequential(Stashing(), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)))
    plan = Plan(pipeline=2, weight_versions=2, micro_batches=4, pipeline_cuts=("2",))
    fd.distribute(model, sgd(model), plan)

    def train() -> None:
        for _ in range(3):
            fd.step(model, MSE, x, y)

    with pytest.raises(PlanError, match="not by its module's attribute"):
        train()


@ranks(4)
def test_other_samples_on_one_rank_are_found_on_all_ranks() -> None:
    here = fd.init()
    for other in range(1, 4):
        model, x, y = made(chain), *next(batches(1))
        fd.distribute(model, sgd(model), Plan(pipeline=4, weight_versions=2, micro_batches=4))
        fd.step(model, MSE, x, y)
        fd.step(model, MSE, x, y)
        if here.rank == other:
            x, y = x[:8], y[:8]
        with pytest.raises(Mismatch, match="the shapes of the batch"):
            fd.step(model, MSE, x, y)


@ranks(2)
def test_a_batch_that_was_never_used_is_told_of() -> None:
    rank, notices = fd.init().rank, list[str]()
    model, x, y = made(chain), *next(batches(1))
    fd.distribute(model, sgd(model), Plan(pipeline=2, weight_versions=2))
    fd.step(model, MSE, x, y)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(without_flush, "write_notice", notices.append)
        fd.shutdown()
    assert ["were never used" in each for each in notices] == [True] * (rank == 0)


if __name__ == "__main__":
    pytest.main([__file__])
