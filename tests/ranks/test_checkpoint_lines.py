"""Which checkpoints `keep` removes, and what becomes of those of a line that was given up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import farandole as fd
from farandole.checkpoint.directory import step_directory
from farandole.core.vocabulary.errors import CheckpointError, ConfigError
from tests.ranks.pool import ranks


def begin() -> tuple[Any, Any]:
    """Begin a process's life anew: another world, and a model of its own."""
    fd.shutdown()
    fd.init()
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1))


def names(directory: Path) -> list[str]:
    fd.barrier()
    return sorted(path.name for path in directory.iterdir() if path.is_dir())


def directories(*steps: int, superseded: tuple[int, ...] = ()) -> list[str]:
    return [*(f"step-{step:08d}" for step in steps), *(f"superseded-{step:08d}" for step in superseded)]


@ranks(1, 2)
def test_what_was_just_saved_and_the_last_whole_one_stay(tmp_path: Path) -> None:
    model, optimizer = begin()
    with_keep: Any = {"keep": 1, "asynchronous": False}
    checkpointer = fd.Checkpointer(tmp_path, model, optimizer, asynchronous=False)
    assert checkpointer.save(10)
    assert checkpointer.save(12)
    checkpointer.close()
    if fd.world().is_main:
        file = next(step_directory(tmp_path, 12).glob("*.safetensors"))
        content = bytearray(file.read_bytes())
        content[-2] ^= 1
        file.write_bytes(content)
    fd.barrier()

    model, optimizer = begin()
    checkpointer = fd.Checkpointer(tmp_path, model, optimizer, **with_keep)
    assert checkpointer.load() == 10
    assert names(tmp_path) == directories(10, 12), "nothing is removed before the next one is there"
    assert checkpointer.save(11)
    assert names(tmp_path) == directories(11, superseded=(12,))
    checkpointer.close()

    model, optimizer = begin()
    checkpointer = fd.Checkpointer(tmp_path, model, optimizer, **with_keep)
    assert checkpointer.load() == 11
    checkpointer.close()


@ranks(2)
def test_a_run_that_goes_on_from_an_earlier_step_is_resumed_on_its_own_line(tmp_path: Path) -> None:
    model, optimizer = begin()
    for step in (100, 200, 300):
        fd.save(tmp_path, model, optimizer, step=step)
    model, optimizer = begin()
    fd.load(tmp_path, model, step=100)  # to look at: nothing is resumed
    fd.save(tmp_path, model, optimizer, step=110)
    assert names(tmp_path) == directories(100, 110, 200, 300)
    fd.load(tmp_path, model, optimizer, step=100)
    checkpointer = fd.Checkpointer(tmp_path, model, optimizer, keep=3, asynchronous=False)
    for step in (110, 120, 130):
        assert checkpointer.save(step)
    assert names(tmp_path) == directories(110, 120, 130, superseded=(200, 300))
    checkpointer.close()
    model, optimizer = begin()
    checkpointer = fd.Checkpointer(tmp_path, model, optimizer)
    assert checkpointer.load() == 130
    checkpointer.close()
    fd.load(tmp_path, model, optimizer, step=110)
    fd.save(tmp_path, model, optimizer, step=200)
    fd.load(tmp_path, model, optimizer, step=110)
    fd.save(tmp_path, model, optimizer, step=115)
    assert names(tmp_path) == [
        *directories(110, 115, superseded=(120, 130)), "superseded-00000200", "superseded-00000200-2",
        "superseded-00000300",
    ]  # fmt: skip


@ranks(1)
def test_a_run_from_the_beginning_leaves_those_of_another_alone(tmp_path: Path) -> None:
    model, optimizer = begin()
    for step in (100, 200):
        fd.save(tmp_path, model, optimizer, step=step)
    model, optimizer = begin()
    checkpointer = fd.Checkpointer(tmp_path, model, optimizer, keep=2, asynchronous=False)
    for step in (10, 20, 30):
        assert checkpointer.save(step)
    assert names(tmp_path) == directories(20, 30, 100, 200)
    checkpointer.close()


@ranks(2)
def test_numbers_of_numpy_are_steps_and_fractions_are_not(tmp_path: Path) -> None:
    model, optimizer = begin()
    with pytest.raises(ConfigError, match=r"keep is 1\.5, expected a positive whole number"):
        fd.Checkpointer(tmp_path, model, optimizer, keep=1.5)  # type: ignore[arg-type]
    every: Any = np.int64(2)
    checkpointer = fd.Checkpointer(tmp_path, model, optimizer, every_steps=every, keep=np.int32(1))  # type: ignore[arg-type]
    for step in np.arange(1, 5):
        checkpointer.after_step(step)  # type: ignore[arg-type]
    checkpointer.close()
    assert names(tmp_path) == directories(4)
    assert fd.save(tmp_path, model, optimizer, step=np.int64(7)) == 7  # type: ignore[arg-type]
    assert fd.load(tmp_path, model, optimizer, step=np.int64(7)) == 7  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"expected an integer from 0, got 2\.0"):
        checkpointer.after_step(2.0)  # type: ignore[arg-type]
