"""Faults put into real trainings on real ranks: the verdict names the cause, the rank and the price.

Computing is sleep, so that a busy machine changes little; the sleeps are the truth that prices are held against.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import farandole as fd
from farandole.cli.main import run
from farandole.comm.world.world import world
from farandole.observe.diagnose import Diagnosis, compare, diagnose, to_text
from tests.ranks.pool import ranks
from tests.ranks.slow import SleepInBackward, SlowSamples

pytestmark = pytest.mark.alone

COMPUTE = 0.010
FAULT = 0.050
STEPS = 36


class Virtual(nn.Module):
    """Computes by sleeping, more where `fault` says so; spins or collects garbage for the other faults."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 4)
        self.garbage = [[i] for i in range(200_000)] if fault == "gc" else []
        self.calls = 0
        self.lost: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.fault == "core":
            begin, wall = time.thread_time(), time.monotonic()
            while time.thread_time() - begin < 3 * COMPUTE:
                pass
            self.lost.append(time.monotonic() - wall - 3 * COMPUTE)
        else:
            time.sleep(3 * COMPUTE if self.fault == "calm" else COMPUTE)
        if self.fault == "forward":
            time.sleep(FAULT)
        if self.fault == "gc" and self.calls % 3 == 0:
            gc.collect()
        if self.fault == "spike" and self.calls % 6 == 0:
            time.sleep(5 * FAULT)
        slow = COMPUTE + (FAULT if self.fault == "backward" else 0.0)
        hidden: torch.Tensor = SleepInBackward.apply(self.first(x), partial(time.sleep, slow))
        return self.last(hidden)  # type: ignore[no-any-return]


def loader_of(seconds: float) -> DataLoader[Any]:
    dataset = SlowSamples(torch.randn(4 * STEPS, 8), torch.zeros(4 * STEPS).long())
    dataset.seconds = seconds / 2
    return DataLoader(dataset, batch_size=2)


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, steps: int = STEPS) -> None:
    done = 0
    while done < steps:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            done += 1
            if done == steps:
                return


@ranks(2)
def train(directory: str, faults: list[str], loaders: list[float], steps: int) -> None:
    fd.init(run_dir=directory)
    rank = world().rank
    with neighbour(faults[rank] == "core"):
        model = Virtual(faults[rank])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        fd.distribute(model, optimizer)
        loop(model, optimizer, fd.shard(loader_of(loaders[rank])), steps)
    if model.lost:
        (Path(directory) / "lost.json").write_text(json.dumps(statistics.mean(model.lost)))
    fd.shutdown()


@ranks(2)
def train_in_a_wrapper(directory: str) -> None:
    """The same under DistributedDataParallel, which only is looked at."""
    fd.init(run_dir=directory)
    model = nn.parallel.DistributedDataParallel(Virtual("backward" if world().rank == 1 else ""))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = loader_of(0.0)
    fd.record(model, optimizer, loader)
    loop(model, optimizer, loader)
    fd.shutdown()


@contextlib.contextmanager
def neighbour(wanted: bool) -> Iterator[None]:
    """Bind this process to one core, and let another program spin on it."""
    if not wanted:
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    spin = "import time\nend = time.monotonic() + 30\nwhile time.monotonic() < end: pass"
    other = subprocess.Popen([sys.executable, "-S", "-c", spin])
    try:
        yield
    finally:
        other.kill()
        other.wait()
        os.sched_setaffinity(0, cores)


def diagnosis_of(
    directory: Path, faults: tuple[str, str] = ("", ""), loaders: tuple[float, float] = (0, 0), steps: int = STEPS
) -> Diagnosis:
    train(directory=str(directory), faults=list(faults), loaders=list(loaders), steps=steps)
    return diagnose(directory)


@pytest.mark.full("busy")
@pytest.mark.parametrize("phase", ["backward", "forward"])
def test_a_rank_that_is_slow_while_it_computes(phase: str, tmp_path: Path) -> None:
    found = diagnosis_of(tmp_path, ("", phase))
    first = found.findings[0]
    assert (found.bound, first.kind, first.ranks, first.phase) == ("straggler", "straggler", (1,), phase), to_text(
        found
    )
    assert first.seconds == pytest.approx(FAULT, rel=0.15)


@pytest.mark.full("busy")
def test_a_rank_whose_data_is_slow(tmp_path: Path) -> None:
    found = diagnosis_of(tmp_path, loaders=(FAULT, 0.0))
    first = found.findings[0]
    assert (first.kind, first.ranks, first.phase) == ("straggler", (0,), "data"), to_text(found)
    assert first.seconds == pytest.approx(FAULT, rel=0.15)


@pytest.mark.full("busy")
def test_all_ranks_wait_for_data(tmp_path: Path) -> None:
    found = diagnosis_of(tmp_path, loaders=(FAULT, FAULT))
    first = found.findings[0]
    assert (found.bound, first.kind, first.ranks) == ("input", "input", ()), to_text(found)
    assert first.seconds == pytest.approx(FAULT, rel=0.15)


@pytest.mark.full("busy")
def test_garbage_collection(tmp_path: Path) -> None:
    found = diagnosis_of(tmp_path, ("gc", ""))
    first = found.findings[0]
    assert (found.bound, first.kind, first.ranks) == ("pauses", "gc", (0,)), to_text(found)
    assert "every 3 steps" in first.evidence
    assert "gc.freeze()" in first.fixes[0].paste


@pytest.mark.full("busy")
def test_spikes_of_one_rank(tmp_path: Path) -> None:
    found = diagnosis_of(tmp_path, ("", "spike"))
    first = found.findings[0]
    assert (first.kind, first.ranks, first.phase) == ("irregular", (1,), "forward"), to_text(found)
    assert first.title.startswith("every 6 steps")
    assert first.seconds == pytest.approx(5 * FAULT * 6 / 33, rel=0.15)


@pytest.mark.full("busy")
def test_a_core_that_something_else_uses_too(tmp_path: Path) -> None:
    found = diagnosis_of(tmp_path, ("calm", "core"), steps=45)
    first = found.findings[0]
    assert (first.kind, first.ranks) == ("oversubscribed", (1,)), to_text(found)
    lost = json.loads((tmp_path / "lost.json").read_text())
    assert lost > COMPUTE, "the neighbour takes its share"
    assert first.seconds == pytest.approx(lost, rel=0.3)
    assert "waited for a core" in first.evidence[-1]


@pytest.mark.full("busy")
def test_a_wrapper_that_waits_inside_backward(tmp_path: Path) -> None:
    train_in_a_wrapper(directory=str(tmp_path))
    found = diagnose(tmp_path)
    first = found.findings[0]
    assert (first.kind, first.ranks, first.phase) == ("straggler", (1,), "backward"), to_text(found)
    assert first.seconds == pytest.approx(FAULT, rel=0.15)


@pytest.mark.full("further")
def test_healthy_runs_and_their_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = diagnosis_of(tmp_path / "before", loaders=(0.030, 0.030))
    after = diagnosis_of(tmp_path / "after")
    assert (before.bound, after.bound) == ("input", "compute"), to_text(before) + to_text(after)
    difference = compare(tmp_path / "before", tmp_path / "after")
    assert difference.outcome == "faster"
    assert "most of it in data" in difference.verdict
    assert run(["diagnose", str(tmp_path / "before"), "--fail-over", "20", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["findings"][0]["kind"] == "input"
    assert run(["diagnose", str(tmp_path / "after"), "--fail-over", "20"]) == 0
