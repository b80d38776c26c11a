"""`fd.record` with what trainers hand out, and with nonsense: it never raises, and says what it cannot record."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import farandole as fd
from farandole.comm.world.world import world
from farandole.observe.records.rows import StepRow
from farandole.observe.records.timeline_reader import read_events
from tests.ranks.pool import ranks


def recorded(directory: Path) -> list[StepRow]:
    """End the world and return this rank's steps."""
    rank = world().rank
    fd.shutdown()
    return list(read_events(directory / f"events-rank{rank}.jsonl").steps)


class NoSetter(DataLoader[Any]):
    """As Accelerate's loaders: its class cannot be changed."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return DataLoader


class WrappedOptimizer(torch.optim.Optimizer):
    """As Accelerate's: an optimizer by name that has not run its constructor."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


class Exploding:
    """Raises whatever is asked."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


@ranks(1)
def test_what_cannot_be_recorded_is_said_and_nothing_is_raised(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fd.init(run_dir=tmp_path)
    strange: list[tuple[Any, str]] = [
        ((model, optimizer, iter([1])), "list_iterator"),
        ((model, optimizer, [1, 2]), "a list, whose iteration cannot be timed"),
        ((model, optimizer, 3), "a int, expected"),
        ((model, []), "an empty list"),
        ((optimizer, optimizer), "the model is a SGD"),
        ((None, None), "NoneType"),
        ((Exploding(), Exploding(), Exploding()), "Exploding"),
    ]
    for arguments, words in strange:
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            fd.record(*arguments)
        assert words in said.getvalue(), said.getvalue()
        assert said.getvalue().startswith("farandole: warning: record: ")
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        fd.record(model, optimizer, run_dir="elsewhere")
    assert "is ignored" in said.getvalue()


@ranks(1)
def test_wrapped_optimizers_and_loaders_are_recorded(tmp_path: Path) -> None:
    model = nn.Linear(8, 2)
    optimizer = WrappedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    loader = NoSetter(TensorDataset(torch.randn(6, 8)), batch_size=2)
    fd.record(model, optimizer, loader, run_dir=tmp_path)
    for (batch,) in loader:
        model(batch).sum().backward()
        optimizer.optimizer.step()
    rows = recorded(tmp_path)
    assert [row.samples for row in rows] == [2, 2, 2]


@ranks(2)
def test_the_wrapper_of_a_bare_model_is_found(tmp_path: Path) -> None:
    fd.init(run_dir=tmp_path)
    bare = nn.Linear(4, 2)
    wrapped = nn.parallel.DistributedDataParallel(bare)
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
    fd.record(bare, optimizer)
    for _ in range(3):
        wrapped(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    assert [len(row.exchanges) for row in recorded(tmp_path)] == [1, 1, 1]
