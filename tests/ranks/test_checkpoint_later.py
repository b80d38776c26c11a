"""Asynchronous saves whose copy goes on beside the training: one moment of it, or an error by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.checkpoint.directory import saved_steps
from farandole.core.host.process_status import PageWatch
from farandole.train.checkpoint.later_copy import LaterCopy
from tests.ranks.pool import ranks, takes

WIDTH = 600
"""A weight has 1.4 MB: enough to be copied later."""


class Model(nn.Module):
    """Parameters, small buffers, and a large one, both of which a forward pass changes."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.register_buffer("seen", torch.zeros(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, WIDTH)."""
        self.seen += 1
        out: torch.Tensor = self.layers(x)
        return out


class Held:
    """The copies of saves, from here to `release`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._may = threading.Event()
        copy, may = LaterCopy.copy, self._may

        def held(later: LaterCopy) -> set[str]:
            may.wait(20)
            return copy(later)

        patch.setattr(LaterCopy, "copy", held)

    def release(self) -> None:
        """Let them begin."""
        self._may.set()


def watching() -> bool:
    try:
        PageWatch().close()
    except OSError:
        return False
    return True


@takes(60)
@ranks(2)
def test_a_copy_beside_the_training_is_of_one_moment_or_fails_by_name(tmp_path: Path) -> None:
    here = fd.init(progress=False)
    torch.manual_seed(0)
    model: Any = Model()
    other = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    fd.distribute(model, optimizer)
    saver = fd.Checkpointer(tmp_path, model, optimizer)

    def backward() -> None:
        model(torch.randn(8, WIDTH)).square().mean().backward()

    def states() -> list[torch.Tensor]:
        moments = [each[name] for each in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        return [each.detach().clone() for each in (*model.state_dict().values(), *moments)]

    def require(step: int, expected: list[torch.Tensor]) -> None:
        fd.load(tmp_path, model, optimizer, step=step)
        for one, two in zip(states(), expected, strict=True):
            assert torch.equal(one, two), f"step {step} is not the moment of its save"

    def train() -> None:
        backward()
        optimizer.step()
        optimizer.zero_grad()

    def save_and(step: int, act: Callable[[], Any]) -> list[torch.Tensor]:
        """Save, and act before anything is copied that can wait."""
        expected = states()
        with pytest.MonkeyPatch.context() as patch:
            held = Held(patch)
            assert saver.save(step), f"step {step} begins"
            act()
            held.release()
            saver._wait()
        return expected

    def taken() -> int:
        later = saver._saver._copies.last
        assert later is not None, "the save was asynchronous"
        return len(later.taken)

    train()
    expected = {1: save_and(1, backward)}  # buffers change, and gradients
    # A rank writes half of the weights and their moments; it never has the large buffer copied later.
    assert taken() >= 2 or not watching(), "it was copied later"
    assert not any("seen" in name for name in saver._saver._copies.last.taken), "a buffer"  # type: ignore[union-attr]

    optimizer.zero_grad()
    backward()
    before = states()
    with pytest.MonkeyPatch.context() as patch:
        held = Held(patch)
        saver.save(2)
        threading.Timer(0.3, held.release).start()
        optimizer.step()  # waits
        saver._wait()
    expected[2] = before
    assert saved_steps(tmp_path) == [1, 2], "both are on the disk"

    optimizer.zero_grad()
    weight = model.layers[2].weight

    def write() -> None:
        if here.rank == 1:  # which writes that tensor
            weight.data[5].add_(1)

    def agree() -> None:
        torch.distributed.broadcast(weight.data, 1)

    save_and(3, write)
    if watching():
        assert saved_steps(tmp_path) == [1, 2], "a mixed one is none, on every rank"
        changed = {"model/layers.2.weight"} if here.rank == 1 else set()
        assert saver._saver._copies.at_once == changed, "the rank that saw it copies that at once"
    agree()
    expected[4] = save_and(4, write)
    agree()
    expected[5] = save_and(5, lambda: other.load_state_dict(model.state_dict()))
    with pytest.MonkeyPatch.context() as patch:

        def refuse(_: PageWatch) -> None:
            raise OSError("not permitted")

        patch.setattr(PageWatch, "__init__", refuse)
        expected[6] = states()
        saver.save(6)
        with torch.no_grad():
            model.layers[0].weight.zero_()
        assert taken() == 0, "all at once"
    saver.close()
    assert saved_steps(tmp_path)[-3:] == [4, 5, 6], "the others are whole"
    for step, each in expected.items():
        require(step, each)
    train()
