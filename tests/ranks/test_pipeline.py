"""Pipelines train as one process does: losses, gradients and parameters, for every schedule."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import farandole as fd
from farandole.comm.world.store_sync import all_gather_json
from farandole.core.vocabulary.errors import ConfigError, Mismatch
from farandole.core.vocabulary.spec import Plan
from farandole.parallel.pipeline import cut_model
from tests.ranks.pool import patient, ranks, takes
from tests.warm import run


def chain(layers: int = 8) -> nn.Sequential:
    torch.manual_seed(1)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(6, 6), nn.Tanh()]
    return nn.Sequential(*parts, nn.Linear(6, 3))


def compare(reference: nn.Module, model: nn.Module, what: str) -> None:
    """Parameters and gradients that are here are those of one process."""
    theirs = dict(reference.named_parameters())
    here = 0
    for name, parameter in model.named_parameters():
        if parameter.shape != theirs[name].shape:
            continue
        here += 1
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-5, atol=1e-6, msg=f"{what}: {name}")
        torch.testing.assert_close(
            parameter.grad, theirs[name].grad, rtol=1e-5, atol=1e-6, msg=f"{what}: gradient of {name}"
        )
    assert 0 < here < len(theirs), f"{what}: this rank has {here} of {len(theirs)} parameters"


@pytest.mark.full("further")
@ranks(2, 4)
@takes(60)
def test_five_steps_of_every_schedule_are_those_of_one_process() -> None:
    fd.init()
    torch.manual_seed(3)
    x, y = torch.randn(5, 16, 6), torch.randn(5, 16, 3)
    for schedule in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"):
        for kind in (torch.optim.SGD, torch.optim.Adam)[schedule != "1f1b" :]:
            reference, model = chain(), chain()
            plain, optimizer = (kind(each.parameters(), lr=0.01) for each in (reference, model))
            plan = Plan(pipeline=fd.world().size, schedule=schedule, micro_batches=8)
            fd.distribute(model, optimizer, plan)
            for step in range(5):
                plain.zero_grad(), optimizer.zero_grad()
                expected = nn.functional.mse_loss(reference(x[step]), y[step])
                expected.backward()
                loss = fd.step(model, nn.functional.mse_loss, x[step], y[step])
                torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-7)
                plain.step(), optimizer.step()
            compare(reference, model, f"{schedule}, {kind.__name__}")


class Tied(nn.Module):
    """An embedding that is the output layer too, a skip over all blocks, a mask, and dropout that is off."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(6)])
        self.scale = nn.Parameter(torch.full((6,), 0.5))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(tokens)
        skip = x * self.scale
        mask = (tokens > 2).unsqueeze(-1).to(x.dtype)
        for block in self.blocks:
            x = block(x) + skip * mask
        x += skip
        return {"logits": nn.functional.linear(x, self.embed.weight), "skip": skip}


class Convolutions(nn.Module):
    """BatchNorm, and what is computed in place at the begin of a stage.

    Without a bias before BatchNorm: its gradient is zero but for rounding, of which Adam would make a whole step.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4))
        self.act = nn.ReLU(inplace=True)
        self.body = nn.Sequential(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)),
            nn.ReLU(inplace=True),
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)),
        )
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.stem(x))
        y: torch.Tensor = self.head((self.body(x) + x).mean((2, 3)))
        return y


def in_micro_batches(
    model: nn.Module, loss_of: Callable[[Any, Any], torch.Tensor], x: torch.Tensor, y: torch.Tensor, count: int
) -> torch.Tensor:
    """Forward and backward of one process, by micro-batches."""
    losses = []
    for inputs, targets in zip(x.chunk(count), y.chunk(count), strict=True):
        loss = loss_of(model(inputs), targets)
        (loss / count).backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def cross_entropy(output: Any, targets: torch.Tensor) -> torch.Tensor:
    logits = output["logits"] if isinstance(output, dict) else getattr(output, "logits", output)
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def follow(model: nn.Module, reference: nn.Module, plan: Plan, batches: list[Any], what: str) -> None:
    """Train both by Adam on `batches`; compare."""
    plain, optimizer = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (reference, model))
    fd.distribute(model, optimizer, plan)
    count = plan.micro_batches
    for x, y in batches:
        plain.zero_grad(), optimizer.zero_grad()
        expected = in_micro_batches(reference, cross_entropy, x, y, count)
        loss = fd.step(model, cross_entropy, x, y)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-7, msg=f"{what}: loss")
        if plan.clip_norm is not None:
            nn.utils.clip_grad_norm_(reference.parameters(), plan.clip_norm)
        plain.step(), optimizer.step()
    compare(reference, model, what)


@pytest.mark.full("further")
@ranks(2, 4)
@takes(60)
def test_tied_weights_skips_and_norms_in_every_schedule() -> None:
    size = fd.init().size
    torch.manual_seed(4)
    words = [(torch.randint(0, 11, (8, length)), torch.randint(0, 11, (8, length))) for length in (5, 5, 7, 5, 7)]
    images = [(torch.randn(8, 3, 6, 6), torch.randint(0, 5, (8,))) for _ in range(5)]
    for schedule in ("1f1b", "interleaved", "zb-h1", "zb-v"):
        if size == 4 and schedule in ("interleaved", "zb-v"):
            continue  # eight stages of seven layers
        clip_norm = 0.1 if schedule == "zb-h1" else None
        plan = Plan(pipeline=size, schedule=schedule, micro_batches=4, clip_norm=clip_norm)
        model = Tied()
        follow(model, Tied(), plan, words, f"words, {schedule}")
        has_it = model.embed.weight.shape == (11, 6)
        mine = model.embed.weight.detach().flatten().tolist() if has_it else []
        weights = [each for each in all_gather_json(fd.world(), "tied", mine) if each]
        assert len(weights) == (1 if schedule == "zb-v" else 2), (
            f"{schedule}: {len(weights)} ranks have the embedding"
        )
        assert weights.count(weights[0]) == len(weights), f"{schedule}: the tied weight differs between its ranks"
        if size == 2 or schedule == "1f1b":
            follow(Convolutions(), Convolutions(), plan, images, f"images, {schedule}")


class Deciding(Tied):
    """Looks at what it computed, between its blocks."""

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
            if x.sum() > 0:
                x = x + 1
        return {"logits": nn.functional.linear(x, self.embed.weight)}


class Choosing(nn.Sequential):
    """Calls its first layer once more where the input is negative."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        again = x.sum().item() < 0
        hidden: torch.Tensor = self[0](x)
        output: torch.Tensor = self[1](self[0](hidden) if again else hidden)
        return output


def distributed(model: nn.Module, **keys: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return fd.distribute(model, optimizer, Plan.from_mapping({"pipeline": 2, **keys}, where="test"))


@ranks(2)
def test_what_cannot_be_is_refused_on_every_rank() -> None:
    here = fd.init()
    mse, x, y = nn.functional.mse_loss, torch.ones(8, 6), torch.ones(8, 3)
    tokens = torch.ones(8, 5, dtype=torch.long)

    def refused(message: str, run: Callable[[], Any], kind: type[Exception] = ConfigError) -> None:
        with pytest.raises(kind, match=message):
            run()

    refused("is not distributed", lambda: fd.step(chain(), mse, x, y))
    refused("no module of this Sequential", lambda: distributed(chain(), pipeline_cuts=["layer.9"]))
    refused("2 names, and 2 stages", lambda: distributed(chain(), pipeline_cuts=["2", "4"]))
    refused('precision = "fp16" with pipeline', lambda: distributed(chain(), precision="fp16"))
    refused("train_schedule = .* with pipeline", lambda: distributed(chain(), train_schedule={"0": "*"}))
    refused('schedule = "zb-h1" with zero = 3', lambda: distributed(chain(), zero=3, schedule="zb-h1"))
    model, optimizer = distributed(chain())
    refused("cut into stages", lambda: model(x))
    refused("no farandole.step has computed", optimizer.step)
    refused("9 samples does not divide into 4", lambda: fd.step(model, mse, torch.ones(9, 6), torch.ones(9, 3)))
    refused("have 4 and 8 samples", lambda: fd.step(model, mse, x, y[:4]))
    refused(r"tensor of shape \[2, 3\]", lambda: fd.step(model, lambda out, _: out, x, y))
    refused("returned a float", lambda: fd.step(model, lambda out, _: 0.5, x, y))  # type: ignore[arg-type, return-value]
    refused(
        "computes with the model's parameter '0.weight'",
        lambda: fd.step(model, lambda out, t: mse(out, t) + next(model.parameters()).square().sum(), x, y),
    )
    loss = fd.step(model, mse, x, y)
    with torch.no_grad():
        torch.testing.assert_close(fd.step(model, mse, x, y), loss, msg="forward alone gives the same loss")
    other = torch.full((8, 6), float(here.rank))
    refused("the samples of the batch", lambda: fd.step(model, mse, other, y), Mismatch)
    deciding, _ = distributed(Deciding())
    refused(r"test_pipeline.py:\d+ \(if x.sum\(\) > 0", lambda: fd.step(deciding, cross_entropy, tokens, tokens))
    choosing, _ = distributed(Choosing(nn.Linear(6, 6), nn.Linear(6, 3)))
    signed = torch.full((8, 6), 1.0 - 2 * here.rank)
    refused("calls of modules.*\n?.*same batch", lambda: fd.step(choosing, mse, signed, y), Mismatch)
    short, _ = distributed(nn.Sequential(nn.Linear(6, 3)))
    refused("1 layers to cut at", lambda: fd.step(short, mse, x, y))
    order, _ = distributed(chain(), pipeline_cuts=["0"])
    refused("after its first call", lambda: fd.step(order, mse, x, y))


class Rated(nn.Sequential):
    """Computes by a number that the loop changes, and knows its rank."""

    rate, rank = 0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(x * (1 + self.rate))
        return out


@ranks(2)
def test_a_number_that_the_loop_changes_is_the_step_s_and_one_note_says_what_it_costs() -> None:
    rank, notices = fd.init().rank, list[str]()
    reference, model = Rated(*chain(2)), Rated(*chain(2))
    model.rank = rank
    plain, optimizer = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (reference, model))
    fd.distribute(model, optimizer, Plan(pipeline=2, micro_batches=2))
    torch.manual_seed(3)
    x, y = torch.randn(8, 6), torch.randn(8, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut_model, "write_notice", notices.append)
        for step in range(10):
            reference.rate = model.rate = step
            plain.zero_grad(), optimizer.zero_grad()
            expected = nn.functional.mse_loss(reference(x), y)
            expected.backward()
            torch.testing.assert_close(fd.step(model, nn.functional.mse_loss, x, y), expected.detach())
            plain.step(), optimizer.step()
    compare(reference, model, "a rate")
    assert ["attributes of the Rated have had 8 values" in each for each in notices] == [True] * (rank == 0)


@ranks(2)
def test_an_average_of_weights_is_made_after_the_cut() -> None:
    fd.init()
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    fd.distribute(model, optimizer, Plan(pipeline=2, micro_batches=2))
    with pytest.raises(
        ConfigError, match=r"AveragedModel is made before the first farandole.step.*after the first"
    ):
        AveragedModel(model)
    teacher = copy.deepcopy(model)
    x, y = torch.randn(8, 6), torch.randn(8, 3)
    assert teacher(x).shape == (8, 3), "a copy of the whole model is one"
    fd.step(model, nn.functional.mse_loss, x, y)
    average = AveragedModel(model)
    optimizer.step()
    average.update_parameters(model)
    for mean, parameter in zip(average.module.parameters(), model.parameters(), strict=True):
        assert torch.equal(mean, parameter), "the first update takes the parameters"


@pytest.mark.full("further")
@ranks(4)
def test_replicas_of_a_pipeline_and_one_process_by_micro_batches() -> None:
    here = fd.init()
    torch.manual_seed(3)
    x, y = torch.randn(3, 16, 6), torch.randn(3, 16, 3)
    for keys in ({"pipeline": 2, "schedule": "zb-h1", "zero": 1}, {"pipeline": 2, "codec": "fp16"}, {}):
        reference, model = chain(), chain()
        plain, optimizer = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (reference, model))
        plan = Plan.from_mapping({"micro_batches": 2, **keys}, where="test")
        fd.distribute(model, optimizer, plan)
        mine = slice(here.sample_rank, None, here.sample_size)
        for step in range(3):
            plain.zero_grad(), optimizer.zero_grad()
            expected = nn.functional.mse_loss(reference(x[step]), y[step])
            expected.backward()
            loss = fd.step(model, nn.functional.mse_loss, x[step][mine], y[step][mine])
            rtol, atol = (1e-2, 1e-3) if "codec" in keys else (1e-5, 1e-6)
            torch.testing.assert_close(loss, expected.detach(), rtol=rtol, atol=atol)
            plain.step(), optimizer.step()
        for name, parameter in model.named_parameters():
            if parameter.numel():
                theirs = reference.get_parameter(name)
                torch.testing.assert_close(parameter, theirs, rtol=rtol, atol=atol, msg=name)


PROGRAM = """
import os, sys, time, torch, farandole as fd
from torch import nn
class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(self.seconds)
        return super().forward(x)
fd.init()
layers = [Slow(4, 4) for _ in range(4)]
for number, layer in enumerate(layers):
    layer.seconds = 0.02 if number == 3 else 0.002
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
fd.distribute(model, optimizer, fd.Plan(pipeline=2, micro_batches=4, pipeline_cuts=("2",)))
for step in range(8):
    if sys.argv[1] == "dies" and step == 4 and fd.world().rank == 1:
        os._exit(3)
    fd.step(model, nn.functional.mse_loss, torch.ones(4, 4), torch.ones(4, 4))
    optimizer.step()
"""


@pytest.mark.full("busy")
@pytest.mark.alone
@patient
def test_the_diagnosis_names_the_slow_stage_and_a_rank_that_dies_ends_all(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    result = run(tmp_path, "run", "-np", "2", "--run-dir", "slow", "--", sys.executable, str(script), "lives")
    assert result.returncode == 0, result.stderr
    told = run(tmp_path, "diagnose", "slow")
    assert "stage 1 (from '2') takes" in told.stdout, told.stdout
    assert "the bubble of schedule 1f1b with 4 micro-batches takes" in told.stdout, told.stdout
    result = run(tmp_path, "run", "-np", "2", "--", sys.executable, str(script), "dies")
    assert result.returncode == 3, result.stderr
    assert "rank 1 on" in result.stderr, result.stderr
    (log,) = tmp_path.glob("runs/*/logs/rank_0.log")
    assert "pipeline" in log.read_text(), log.read_text()
    assert "another rank closed its connection" in log.read_text(), log.read_text()


if __name__ == "__main__":
    pytest.main([__file__])
