"""`offload = "disk"`: the same bits as in memory, bounded memory, nothing left in the directory, refusals."""

from __future__ import annotations

import copy
import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

import farandole as fd
from farandole.core.vocabulary.errors import ConfigError, PlanError
from farandole.parallel.distribute import undistribute
from farandole.parallel.optim import disk_states

Make = Callable[[Any], Optimizer]
MAKERS: dict[str, Make] = {
    "adam": lambda p: Adam(p, 0.01, amsgrad=True),
    "adam-foreach": lambda p: Adam(p, 0.01, foreach=True),
    "adam-fused": lambda p: Adam(p, 0.01, fused=True),
    "adamw": lambda p: AdamW(p, 0.01, weight_decay=0.1),
    "sgd": lambda p: SGD(p, 0.01, momentum=0.9, nesterov=True),
    "sgd-fused": lambda p: SGD(p, 0.01, momentum=0.9, fused=True),
    "adagrad": lambda p: Adagrad(p, 0.01),
    "rmsprop": lambda p: RMSprop(p, 0.01, momentum=0.9, centered=True),
}


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    fd.init(progress=False)
    yield
    fd.shutdown()


@pytest.fixture(params=["nameless", "unlinked"])
def disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory, of a file system with files without a name and of one without."""
    if request.param == "unlinked":
        real = os.open

        def without(path: Any, flags: int, *rest: Any, **named: Any) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, "not supported")
            return real(path, flags, *rest, **named)

        monkeypatch.setattr(os, "open", without)
    return tmp_path


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 33), nn.Conv1d(1, 2, 1), nn.Flatten(), nn.Linear(66, 3, dtype=torch.float32))


def train(model: nn.Module, optimizer: Optimizer, seeds: range) -> None:
    for seed in seeds:
        x = torch.randn(4, 1, 7, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def plan_of(directory: Path) -> fd.Plan:
    return fd.Plan(offload="disk", offload_directory=str(directory))


def mapped(optimizer: Optimizer) -> list[bool]:
    """Return, of each state of a parameter's size, whether it lies in a mapping of a file."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [tuple(int(at, 16) for at in line.split(" ")[0].split("-")) for line in lines if "deleted" in line]
    found = []
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and key != "step":
                found.append(any(begin <= value.data_ptr() < end for begin, end in spans))
    return found


@pytest.mark.parametrize("kind", MAKERS)
def test_the_same_bits_as_in_memory(kind: str, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_states, "STATE_CHUNK_BYTES", 3 * 4096)  # several chunks, some of several parameters
    jobs = []
    for plan in (fd.Plan(), plan_of(disk)):
        model = model_of()
        jobs.append(fd.distribute(model, MAKERS[kind](model.parameters()), plan))
        train(*jobs[-1], range(6))
    (plain, in_memory), (model, on_disk) = jobs
    for name, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    assert len(mapped(on_disk)) >= 6, "there are states"
    assert all(mapped(on_disk)), "all of them in the file"
    assert not any(mapped(in_memory)), "the test can tell"
    assert list(disk.iterdir()) == [], "the file has no name"
    assert [len(group["params"]) for group in on_disk.param_groups] == [6], "groups are as they were"


def test_without_the_plan_states_stay_in_the_file_and_steps_are_those_of_torch(disk: Path) -> None:
    model, by_hand = model_of(), model_of()
    fd.distribute(model, optimizer := AdamW(model.parameters(), 0.01), plan_of(disk))
    train(model, optimizer, range(3))
    undistribute(model)
    by_hand.load_state_dict(model.state_dict())
    plain = AdamW(by_hand.parameters(), 0.01)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, range(3, 6))
    train(by_hand, plain, range(3, 6))
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), by_hand.parameters(), strict=True))
    assert len(optimizer._optimizer_step_pre_hooks) == 1, "that which records"
    assert all(mapped(optimizer)), "nobody has moved them"


def test_a_schedule_may_let_more_train_when_the_plan_is_applied_again(disk: Path) -> None:
    model = model_of()
    optimizer = AdamW(model.parameters(), 0.01)
    for pattern in ("3.*", "*"):
        plan = fd.Plan(offload="disk", offload_directory=str(disk), train_schedule={"0": pattern})
        fd.distribute(model, optimizer, plan)
        train(model, optimizer, range(2))
        undistribute(model)
    assert len(mapped(optimizer)) == 12, "two states of each parameter"
    assert all(mapped(optimizer))


def test_states_are_saved_and_loaded_as_ever(tmp_path: Path) -> None:
    first, second = model_of(), model_of(1)
    fd.distribute(first, optimizer := AdamW(first.parameters(), 0.01), plan_of(tmp_path))
    train(first, optimizer, range(3))
    fd.save(tmp_path / "c", first, optimizer, step=3)
    fd.distribute(second, other := AdamW(second.parameters(), 0.01), plan_of(tmp_path))
    fd.load(tmp_path / "c", second, other)
    assert mapped(other), "loaded"
    assert all(mapped(other)), "loaded states are in the file before the next step"
    train(first, optimizer, range(3, 6))
    train(second, other, range(3, 6))
    for one, two in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, two), "it goes on bit for bit"
    assert all(mapped(other)), "and they stay there"


def test_closures_schedulers_scalers_and_hooks_see_one_step(tmp_path: Path) -> None:
    results = []
    for plan in (fd.Plan(), plan_of(tmp_path)):
        model = model_of()
        optimizer: Any = SGD(model.parameters(), 0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        fd.distribute(model, optimizer, plan)
        seen: list[Optimizer] = []
        optimizer.register_step_pre_hook(lambda own, *_, seen=seen: seen.append(own))
        optimizer.register_step_post_hook(lambda own, *_, seen=seen: seen.append(own))

        def closure(model: nn.Module = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(torch.ones(4, 1, 7)).square().mean()
            loss.backward()
            return loss

        losses = []
        for _ in range(3):
            losses.append(float(optimizer.step(closure).detach()))
            scheduler.step()
        assert seen == [optimizer] * 6, "hooks run once a step, for the optimizer"
        results.append((losses, [each.detach().clone() for each in model.parameters()]))
    assert results[0][0] == results[1][0], "the closure's loss is returned"
    assert all(map(torch.equal, results[0][1], results[1][1])), "the same bits"


def test_parameters_that_come_later_get_a_file_too(tmp_path: Path) -> None:
    model = model_of()
    model[0].requires_grad_(False)
    fd.distribute(model, optimizer := Adam(model.parameters(), 0.01), plan_of(tmp_path))
    train(model, optimizer, range(2))
    model[0].requires_grad_(True)
    train(model, optimizer, range(2))
    assert len(mapped(optimizer)) == 12, "all six parameters train"
    assert all(mapped(optimizer))


_PEAK = """
import sys, torch
from pathlib import Path
import farandole as fd
fd.init(progress=False)
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(24)))
optimizer = torch.optim.Adam(model.parameters(), 1e-4, foreach=True)
plan = fd.Plan(offload="disk", offload_directory=sys.argv[1]) if sys.argv[1:] else fd.Plan()
fd.distribute(model, optimizer, plan)
model(torch.randn(2, 1024)).square().mean().backward()
def read(key):
    return next(int(l.split()[1]) for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(key))
Path("/proc/self/clear_refs").write_text("5")
before = read("VmHWM")
for _ in range(3):
    optimizer.step()
print((read("VmHWM") - before) // 1024, (read("VmRSS") - before) // 1024)
"""


@pytest.mark.full("slow")
def test_resident_memory_stays_bounded(tmp_path: Path) -> None:
    """96 MiB of parameters have 192 MiB of states; what the allocator keeps of freed chunks counts."""
    rises = []
    for words in ([], [str(tmp_path)]):
        done = subprocess.run(
            [sys.executable, "-c", _PEAK, *words], capture_output=True, text=True, timeout=50, check=False
        )
        assert done.returncode == 0, done.stderr
        rises.append([int(each) for each in done.stdout.split()])
    (peak, after), (disk_peak, disk_after) = rises
    assert min(peak, after) >= 190, f"in memory the states are resident: {rises} MiB"
    assert disk_peak <= 80, f"three chunks and temporary tensors: {rises} MiB"
    assert disk_after <= 60, f"after a step only what the allocator keeps: {rises} MiB"


@pytest.mark.full("slow")
def test_nothing_is_left_by_a_process_that_is_killed(tmp_path: Path) -> None:
    text = _PEAK + "\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
    done = subprocess.run(
        [sys.executable, "-c", text, str(tmp_path)], capture_output=True, timeout=50, check=False
    )
    assert done.returncode == -9, done.stderr
    assert list(tmp_path.iterdir()) == [], "no file"


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()

    def refused(words: str, optimizer: Optimizer, directory: str) -> None:
        with pytest.raises(PlanError, match=words):
            fd.distribute(model, optimizer, fd.Plan(offload="disk", offload_directory=directory))

    adam = Adam(model.parameters())
    refused("no directory", adam, str(tmp_path / "missing"))
    refused("is in memory", adam, "/dev/shm")
    refused("keep no states", SGD(model.parameters(), 0.1), str(tmp_path))
    refused("is a LBFGS, expected one of", torch.optim.LBFGS(model.parameters()), str(tmp_path))
    refused("differentiable", Adam(model.parameters(), differentiable=True), str(tmp_path))
    there = [Adam(nn.Linear(2, 2, device="meta").parameters())]
    plan = fd.Plan(offload="disk", offload_directory=str(tmp_path))
    with pytest.raises(PlanError, match="parameters are on meta, expected the CPU") as caught:
        disk_states.reserve_states(fd.world(), there, plan, lambda each: each.shape)
    assert caught.value.remedy == 'set offload = "none"'
    with pytest.raises(PlanError, match='with offload = "none"'):
        fd.Plan(offload_directory="/var/tmp")

    first = model[0].requires_grad_(False)
    with pytest.raises(PlanError, match="is in memory"):
        fd.distribute(model, adam, fd.Plan(offload="disk", offload_directory="/dev/shm", frozen_codec="int8"))
    assert type(first.weight) is nn.Parameter, "refused before frozen weights are stored"
    first.requires_grad_(True)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    refused(r"No space left on device, and the states are \d+ bytes", adam, str(tmp_path))
    assert list(tmp_path.iterdir()) == [], "nothing is left"
    monkeypatch.undo()
    model[0].requires_grad_(False)
    fd.distribute(model, adam, plan_of(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", full)
    model[0].requires_grad_(True)
    with pytest.raises(ConfigError, match="no room for"):
        train(model, adam, range(1))
