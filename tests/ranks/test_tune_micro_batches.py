"""`farandole tune` divides batches of `fd.step` into more or fewer micro-batches; results stay what they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.core.env import TuneSettings
from farandole.parallel.model import DistributedModel
from farandole.train import tuner
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_same_bits
from tests.ranks.test_tune import outcome, tuned

SETTINGS = TuneSettings(("micro_batches",), budget=1.0, cache=False)
STEPS = 120
Loss = Callable[[Any, Any], torch.Tensor]


class Passes(nn.Module):
    """A small model that counts its passes with gradients; `extra` comes before the last layer."""

    def __init__(self, extra: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(6, 16, dtype=torch.float64)
        self.extra = nn.Tanh() if extra is None else extra
        self.last = nn.Linear(16, 4, dtype=torch.float64)
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += torch.is_grad_enabled()
        out: torch.Tensor = self.last(self.extra(self.first(x)))
        return out


def batch_of(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch of 8, and now and then one that does not divide, of another size on each rank."""
    draw = torch.Generator().manual_seed(10 * step + rank)
    rows = 8 if step % 6 else 7 - rank
    x = torch.randn(rows, 6, generator=draw, dtype=torch.float64)
    return x, torch.randint(0, 4, (rows,), generator=draw)


def ignoring(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch whose parts have unequal numbers of targets that do not count, in some steps of rank 1."""
    x, targets = batch_of(step, rank)
    if rank and step % 4 == 0:
        targets[0] = -100
    return x, targets


def train(
    model: Passes, plan: fd.Plan, after: Callable[[int], None] = lambda passes: None, *,
    loss: Loss = nn.functional.cross_entropy, batches: Callable[[int, int], Any] = batch_of, **named: Any,
) -> list[float]:  # fmt: skip
    """Train by `fd.step`; return the losses. `after` is told the passes of each step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    fd.distribute(model, optimizer, plan)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        before = model.passes
        losses.append(float(fd.step(model, loss, *batches(step, fd.world().rank), **named)))
        after(model.passes - before)
        optimizer.step()
    return losses


def require_as_untuned(model: Passes, losses: list[float], plan: fd.Plan, **named: Any) -> None:
    """Train once more in the same world, which tunes no longer, and compare."""
    other = Passes()
    expected = train(other, plan, **named)
    assert losses == pytest.approx(expected, rel=1e-10, abs=1e-10)
    for value, same in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(value, same, rtol=1e-10, atol=1e-10)
    assert_same_bits(model)


@pytest.mark.gate_cases("True-2-8")
@pytest.mark.parametrize(("planned", "best"), [(0, 4), (4, 1), (2, 8)])
@pytest.mark.parametrize("counts", [False, True])
@ranks(2)
def test_a_planted_best_number_is_found_and_results_are_those_of_the_plan(
    planned: int, best: int, counts: bool, tmp_path: Path
) -> None:
    plan, directory = fd.Plan(route="flat", micro_batches=planned), str(tmp_path)
    named: dict[str, Any] = {"count": lambda targets: (targets != -100).sum()} if counts else {}
    named["batches"] = whole_batches if planned > 1 else ignoring
    with tuned(directory, SETTINGS) as clock, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuner, "has_room", lambda *_: True)
        model, seen = Passes(), []

        def after(passes: int) -> None:
            seen.append(passes)
            clock.now += 0.01 * (1 + abs(passes.bit_length() - best.bit_length()))

        losses = train(model, plan, after, **named)
        found = outcome(directory)
        assert found["best"]["micro_batches"] == best, [
            (each["changes"], each["verdict"], each["why"]) for each in found["trials"]
        ]
        assert found["start"]["micro_batches"] == max(1, planned), found
        assert best in seen[-5:], seen
        assert fd.Plan.read(tmp_path / "tuned.toml").micro_batches == best if fd.world().rank == 0 else True
    fd.shutdown()
    fd.init()
    require_as_untuned(model, losses, plan, **named)
    fd.shutdown()


def whole_batches(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch of 8: a plan that names a number refuses what does not divide."""
    return batch_of(6 * step + 1, rank)


class Gathering(nn.Module):
    """A layer that asks all ranks in each pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gathered: torch.Tensor = fd.gather(x.detach())
        return x + 0.0 * gathered.mean()


def compares_samples(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return a loss that is no mean over samples."""
    return nn.functional.cross_entropy(output, targets) + (output - output.mean(0)).square().mean()


@pytest.mark.full_cases("extra1-None-plan1-a pass changes buffers", "None-None-plan4-accumulate = 2")
@pytest.mark.parametrize(
    ("extra", "loss", "plan", "reason"),
    [
        (nn.Dropout(0.1), None, {}, "a pass draws random numbers"),
        (nn.BatchNorm1d(16, dtype=torch.float64), None, {}, "a pass changes buffers"),
        (Gathering(), None, {}, "ranks exchange something in a forward pass"),
        (None, compares_samples, {}, "the loss of a batch depends on how it is divided"),
        (None, None, {"accumulate": 2}, "accumulate = 2"),
    ],
)
@ranks(2)
def test_what_would_change_results_is_refused_by_name(
    extra: nn.Module | None, loss: Loss | None, plan: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with tuned(str(tmp_path), SETTINGS) as clock:
        model, seen = Passes(extra), []

        def after(passes: int) -> None:
            seen.append(passes)
            clock.now += 0.01 / passes

        train(model, fd.Plan(route="flat", **plan), after, loss=loss or nn.functional.cross_entropy)
        found = outcome(str(tmp_path))
        assert reason in " ".join([*found["notes"], found["stopped"]]), found
        assert found["best"] == found["start"], found
        assert set(seen) == {1}, "each batch went in one pass"
    fd.shutdown()


@pytest.mark.full("further")
@ranks(2)
def test_what_changes_results_later_on_one_rank_is_taken_back_on_all(tmp_path: Path) -> None:
    dropout = nn.Dropout(0.5)
    with tuned(str(tmp_path), SETTINGS) as clock:
        model, seen = Passes(dropout), []

        def after(passes: int) -> None:
            seen.append(passes)
            clock.now += 0.01 / passes
            if seen.count(4) > 3 and fd.world().rank:
                dropout.train()

        dropout.eval()
        train(model, fd.Plan(route="flat"), after)
        found = outcome(str(tmp_path))
        assert "cannot change: a pass draws random numbers, as dropout does (rank 1)" in found["stopped"], found
        assert found["best"] == found["start"], found
        assert {trial["verdict"] for trial in found["trials"]} <= {"rolled back", "not finished"}, found
        assert seen[-1] == 1, seen
        assert 4 in seen, seen
        assert_same_bits(model)
    fd.shutdown()


@pytest.mark.gate_cases("plain", "hook", "several")
@pytest.mark.parametrize("kind", ["plain", "held", "several", "noise", "hook", "balance"])
@ranks(2)
def test_loops_that_are_left_alone(kind: str, tmp_path: Path) -> None:
    reasons = {"plain": "does not call farandole.step", "held": "fd.accumulate holds", "several": "several models",
               "noise": "noise of gradients", "hook": "hooks of the script",
               "balance": "balance and z"}  # fmt: skip
    with tuned(str(tmp_path), SETTINGS) as clock:
        model, other = Passes(), Passes()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        fd.distribute(model, optimizer, fd.Plan(route="flat"))
        if kind == "several":
            fd.distribute(other, torch.optim.SGD(other.parameters(), 0.1), fd.Plan(route="flat"))
        reducer = DistributedModel.of(model).reducer
        assert reducer is not None
        if kind == "noise":
            reducer.measure_noise(lambda reading: None, samples=8)
        if kind == "hook":
            model.last.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
        for step in range(20):
            optimizer.zero_grad()
            x, targets = batch_of(6 * step + 1, fd.world().rank)
            if kind == "plain":
                nn.functional.cross_entropy(model(x), targets).backward()
            else:
                if kind == "held":
                    with fd.accumulate():
                        fd.step(model, nn.functional.cross_entropy, x, targets)
                fd.step(model, nn.functional.cross_entropy, x, targets, balance=0.1 * (kind == "balance"))
            clock.now += 0.01
            optimizer.step()
        found = outcome(str(tmp_path))
        assert reasons[kind] in found["notes"][-1], found
        assert not found["trials"], found
    fd.shutdown()
