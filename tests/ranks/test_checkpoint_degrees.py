"""Checkpoints of divided models: into any degrees and any number of ranks, bit for bit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

import farandole as fd
from farandole.checkpoint.export import export_weights
from farandole.core.vocabulary.spec import Plan
from farandole.parallel.split import split_of
from tests.ranks.pool import ranks, takes
from tests.ranks.test_degrees import Text, batch, loss_of, plan_of


class Run:
    """A training of `Text` with Adam, by one plan."""

    def __init__(self, plan: Plan, *, experts: bool = False, seed: int = 1) -> None:
        self.here = fd.init()
        self.plan = plan
        self.model = Text(experts=experts)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1 + seed / 8)
        fd.distribute(self.model, self.optimizer, plan)

    def train(self, first: int, last: int) -> list[float]:
        """Train some steps; return their losses."""
        losses = []
        for number in range(first, last):
            share = [each.chunk(self.here.sample_size)[self.here.sample_rank] for each in batch(number)]
            tokens, places, targets = (each.contiguous() for each in share)
            self.optimizer.zero_grad()
            losses.append(float(fd.step(self.model, loss_of, (tokens, places), targets)))
            self.optimizer.step()
        return losses

    def require(self, folder: Path) -> None:
        """What this rank has is, bit for bit, its part of what is whole in `folder`."""
        wanted: dict[str, torch.Tensor] = torch.load(folder / "whole.pt")
        seen = 0
        for name, parameter in self.model.named_parameters():
            if not parameter.numel() and not isinstance(parameter, DTensor):
                continue  # another stage's
            states = self.optimizer.state[parameter]
            assert set(states) == {"step", "exp_avg", "exp_avg_sq"}, f"{name} has its states"
            for key, value in {"": parameter, **states}.items():
                split, whole = split_of(parameter), wanted[f"{name}/{key}"]
                part = split.take(whole) if split is not None and whole.dim() else whole
                found = self.optimizer.state_dict()["state"][self.index(parameter)][key] if key else value
                found = found.full_tensor() if isinstance(found, DTensor) else found
                assert torch.equal(found.detach(), part), f"{name} {key} by {self.here.degrees}"
                seen += 1
        assert seen, "some are here"

    def index(self, parameter: nn.Parameter) -> int:
        """Return the number of a parameter in the optimizer's state dict."""
        listed = [each for group in self.optimizer.param_groups for each in group["params"]]
        return next(i for i, each in enumerate(listed) if each is parameter)


def keep_whole(run: Run, folder: Path) -> None:
    """In one process: keep what it has, by names."""
    states = {
        f"{name}/{key}": value.detach()
        for name, parameter in run.model.named_parameters()
        for key, value in {"": parameter, **run.optimizer.state[parameter]}.items()
    }
    torch.save(states, folder / "whole.pt")


@ranks(1)
def _save_whole(folder: str, *, experts: bool = False) -> None:
    run = Run(Plan(), experts=experts)
    run.train(0, 2)
    keep_whole(run, Path(folder))
    fd.save(Path(folder) / "1", run.model, run.optimizer)


@ranks(1)
def _load_whole(folder: str, name: str, *, experts: bool = False) -> None:
    run = Run(Plan(), experts=experts, seed=4)
    fd.load(Path(folder) / name, run.model, run.optimizer)
    keep_whole(run, Path(folder))


def _pass_on(folder: str, plan: Plan, *, experts: bool, later: bool = False) -> None:
    """Load what one process saved, save it, go on, and resume what was saved."""
    run = Run(plan, experts=experts, seed=2)
    place = Path(folder)
    fd.load(place / "1", run.model, run.optimizer)
    run.require(place)
    if plan.pipeline != 1:
        run.train(7, 8)  # now the model is cut
        fd.load(place / "1", run.model, run.optimizer)
        run.require(place)
    if later:
        checkpointer = fd.Checkpointer(place / "again", run.model, run.optimizer)
        assert checkpointer.save(2), "it began"
        checkpointer.close()
    else:
        fd.save(place / "again", run.model, run.optimizer, step=2)
    trains = plan.zero < 3  # layers that are divided so twice are only saved and loaded
    losses = run.train(2, 4) if trains else []
    for cuts_first in (False, True) if plan.pipeline != 1 else (False,):
        other = Run(plan, experts=experts, seed=3)
        if cuts_first:
            other.train(6, 7)
        fd.load(place / "again", other.model, other.optimizer)
        other.require(place)
        assert not trains or other.train(2, 4) == losses, "it goes on as the first run did"
        for (name, one), two in zip(run.model.named_parameters(), other.model.parameters(), strict=True):
            parts = [each.to_local() if isinstance(each, DTensor) else each for each in (one, two)]
            assert torch.equal(*parts), name


@ranks(2)
@takes(60)
def _pass_on_two(folder: str, degree: str, **keys: Any) -> None:
    if degree == "pipeline":
        keys["pipeline_cuts"] = ("blocks.2",)
    _pass_on(folder, plan_of((degree,), **keys), experts=degree == "expert")


@ranks(4)
@takes(60)
def _pass_on_four(folder: str, degrees: list[str], **keys: Any) -> None:
    _pass_on(folder, plan_of(tuple(degrees), **keys), experts="expert" in degrees, later=True)


@pytest.mark.gate_cases("pipeline", "expert")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("degree", ["tensor", "expert", "pipeline"])
def test_a_divided_model_is_saved_whole_and_resumed(degree: str, tmp_path: Path) -> None:
    _save_whole(folder=str(tmp_path), experts=degree == "expert")
    before = (tmp_path / "whole.pt").read_bytes()
    _pass_on_two(folder=str(tmp_path), degree=degree)
    _load_whole(folder=str(tmp_path), name="again", experts=degree == "expert")
    assert (tmp_path / "whole.pt").read_bytes() == before, "one process has the same bits again"


FOUR: list[tuple[list[str], dict[str, Any]]] = [
    (["data", "tensor"], {"zero": 1}),
    (["shard", "tensor"], {}),
    (["tensor", "pipeline"], {"pipeline_cuts": ("blocks.2",)}),
    (["data", "pipeline"], {"pipeline_cuts": ("blocks.2",), "zero": 1}),
    (["data", "expert"], {}),
]


@pytest.mark.full("further")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("degrees", "keys"), FOUR, ids=["-".join(each) for each, _ in FOUR])
def test_a_model_of_two_degrees_is_saved_whole_and_resumed(
    degrees: list[str], keys: dict[str, Any], tmp_path: Path
) -> None:
    experts = "expert" in degrees
    _save_whole(folder=str(tmp_path), experts=experts)
    before = (tmp_path / "whole.pt").read_bytes()
    _pass_on_four(folder=str(tmp_path), degrees=degrees, **keys)
    _load_whole(folder=str(tmp_path), name="again", experts=experts)
    assert (tmp_path / "whole.pt").read_bytes() == before, "one process has the same bits again"


class Mixed(nn.Module):
    """Attention whose three matrices are one parameter, dropout, tied weights, and large matrices."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.TransformerEncoderLayer(16, 4, 64, dropout=0.2, batch_first=True)
        self.wide = nn.Sequential(nn.Linear(16, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.Linear(1024, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, length, 16)."""
        found: torch.Tensor = self.wide(self.layer(x))
        return found


LARGE = Plan(tensor=2, tensor_recipe={"wide.0": "columns", "wide.2": "rows"})


@takes(60)
@ranks(2)
def _save_later(folder: str) -> None:
    fd.init()
    runs = []
    for seed in (1, 2):
        model = Mixed(seed)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        runs.append((*fd.distribute(model, optimizer, LARGE), seed))

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        x = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(8))
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    model, optimizer, _ = runs[0]
    train(model, optimizer)
    checkpointer = fd.Checkpointer(folder, model, optimizer)
    for step in (1, 2):
        kept = {name: each.detach().clone() for name, each in model.named_parameters()}
        assert checkpointer.save(step), "it began"
        losses = [train(model, optimizer) for _ in range(2)]
    checkpointer.close()
    again, its_optimizer, _ = runs[1]
    fd.load(folder, again, its_optimizer)
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, kept[name]), f"{name} is as it was when the save began"
    assert [train(again, its_optimizer) for _ in range(2)] == losses, "dropout drops the same elements again"
    torch.save({name: (each, split_of(model.get_parameter(name))) for name, each in kept.items()},
               Path(folder) / f"parts-{fd.world().rank}.pt")  # fmt: skip


def test_parts_are_copied_later_and_exported_whole(tmp_path: Path) -> None:
    _save_later(folder=str(tmp_path))
    export_weights(tmp_path, 2, tmp_path / "whole.safetensors")
    found = load_file(tmp_path / "whole.safetensors")
    parts = [torch.load(tmp_path / f"parts-{rank}.pt", weights_only=False) for rank in range(2)]
    plain = Mixed(3)
    plain.load_state_dict(found)
    divided = 0
    for name, whole in plain.named_parameters():
        for rank in range(2):
            part, split = parts[rank][name]
            divided += split is not None and len(split.pieces)
            assert torch.equal(part, whole if split is None else split.take(whole)), f"{name} of rank {rank}"
    assert divided > 12, "parameters of one piece and of several are divided"


class Counts(nn.Module):
    """Buffers that change, in both stages."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.second = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, affine=False))
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.get_parameter("0.weight")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, 6)."""
        found: torch.Tensor = self.last(self.second(self.first(x)))
        return found


def run_counts(plan: Plan, seed: int) -> tuple[Counts, torch.optim.Optimizer]:
    model = Counts(seed)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return fd.distribute(model, optimizer, plan)


STAGES = Plan(pipeline=2, pipeline_cuts=("second",), micro_batches=2)


@takes(60)
@ranks(2)
def _save_buffers(folder: str) -> None:
    here = fd.init()
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(5))
    model, optimizer = run_counts(STAGES, 1)
    for _ in range(2):
        optimizer.zero_grad()
        fd.step(model, nn.functional.mse_loss, x, x)
        optimizer.step()
    fd.save(folder, model, optimizer)
    own = (model.first, model.second)[here.rank]
    parts = [{name: each.clone() for name, each in part.state_dict().items()} for part in (own, model.last)]
    torch.save(parts, Path(folder) / f"own-{here.rank}.pt")
    again, its_optimizer = run_counts(STAGES, 2)
    fd.load(folder, again, its_optimizer)
    for each, its in ((model, optimizer), (again, its_optimizer)):
        its.zero_grad()
        fd.step(each, nn.functional.mse_loss, x, x)
        its.step()
    for name, value in model.state_dict().items():
        is_here = name.startswith(("first", "last.weight") if here.rank == 0 else ("second", "last"))
        assert not is_here or torch.equal(again.state_dict()[name], value), f"{name} went on"


@ranks(1)
def _load_buffers(folder: str) -> None:
    fd.init()
    model, optimizer = run_counts(Plan(), 3)
    fd.load(folder, model, optimizer)
    own = [torch.load(Path(folder) / f"own-{rank}.pt") for rank in range(2)]
    for part, saved in ((model.first, own[0][0]), (model.second, own[1][0]), (model.last, own[1][1])):
        for name, value in part.state_dict().items():
            assert torch.equal(value, saved[name]), f"{name} is that of the stage that has it"
    assert model.last.weight is next(model.first.parameters()), "it is tied"
    assert int(model.second.get_buffer("1.num_batches_tracked")) == 4, "micro-batches were counted"


def test_a_pipeline_saves_the_buffers_of_the_stage_that_changes_them(tmp_path: Path) -> None:
    _save_buffers(folder=str(tmp_path))
    _load_buffers(folder=str(tmp_path))


@takes(60)
@ranks(2)
def test_what_codecs_keep_of_another_mesh_is_dropped_with_a_warning(tmp_path: Path) -> None:
    fd.init()
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fd.distribute(model, optimizer, Plan(codec="int8", lossy=True))
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    fd.save(tmp_path, model, optimizer)
    other = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    fd.distribute(other, optimizer, Plan(tensor=2, tensor_recipe={"0": "columns", "2": "rows"}))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fd.load(tmp_path, other, optimizer)
    said = [str(each.message) for each in seen if "what the codecs had left is dropped" in str(each.message)]
    assert len(said) == (fd.world().rank == 0), f"rank 0 says so: {said}"
    split = split_of(next(other.parameters()))
    assert split is not None, "it is divided"
    assert torch.equal(next(other.parameters()), split.take(next(model.parameters()))), "weights are loaded"
