"""`farandole diagnose` proposes `fd.Checkpointer` where saves stop the steps, and not where one is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.observe.diagnose import Finding, diagnose, to_text
from tests.ranks.pool import ranks, takes

pytestmark = pytest.mark.full("further")

STEPS = 24
EVERY = 4


@takes(60)
@ranks(2)
def train(directory: Path, way: str) -> None:
    """Train with a save every few steps that takes far longer than a step."""
    here = fd.init(run_dir=directory / "run", progress=False)
    model: Any = nn.Linear(1500, 1500)
    optimizer: Any = torch.optim.AdamW(model.parameters(), 0.01)
    fd.distribute(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    checkpointer = None
    if way == "checkpointer":
        checkpointer = fd.Checkpointer(directory / "saved", model, optimizer, every_steps=1, scheduler=scheduler)
    for step in range(1, STEPS + 1):
        model(torch.randn(2, 1500)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if checkpointer is not None:
            checkpointer.after_step(step)
        elif step % EVERY == 0 and way == "fd.save":
            fd.save(directory / "saved", model, optimizer, step=step, scheduler=scheduler)
        elif step % EVERY == 0 and here.is_main:
            torch.save([torch.zeros(40_000_000)], directory / "last.pt")
    if checkpointer is not None:
        checkpointer.close()
    fd.shutdown()


def pause_of(directory: Path) -> Finding:
    diagnosis = diagnose(directory / "run")
    found = [each for each in diagnosis.findings if (each.kind, each.phase) == ("pause", "checkpoint")]
    assert len(found) == 1, to_text(diagnosis)
    assert found[0].fixes[0].paste in to_text(diagnosis) or "\n" in found[0].fixes[0].paste, to_text(diagnosis)
    return found[0]


@pytest.mark.timeout(150)
def test_saves_that_stop_the_steps_become_a_checkpointer(tmp_path: Path) -> None:
    train(directory=tmp_path, way="fd.save")
    fix = pause_of(tmp_path).fixes[0]
    directory = tmp_path / "saved"
    call = f'fd.Checkpointer("{directory}", model, optimizer, scheduler=scheduler, every_steps={EVERY})'
    assert fix.paste.splitlines()[1] == f"checkpointer = {call}", fix
    assert fix.gain is not None, fix
    assert 0 < fix.gain.seconds < pause_of(tmp_path).seconds, "part of the pauses, not all"
    # What is proposed can be pasted: the names are those of a usual script.
    fd.init(progress=False)
    try:
        model: Any = nn.Linear(1500, 1500)
        optimizer: Any = torch.optim.AdamW(model.parameters(), 0.01)
        fd.distribute(model, optimizer)
        names: dict[str, Any] = {
            "fd": fd, "model": model, "optimizer": optimizer, "step": STEPS + EVERY,
            "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5),
        }  # fmt: skip
        exec(fix.paste, names)
        assert fd.load(directory, model, optimizer) == STEPS + EVERY, "the lines that were pasted have saved"
    finally:
        fd.shutdown()


@pytest.mark.timeout(150)
def test_torch_save_is_proposed_with_usual_names(tmp_path: Path) -> None:
    train(directory=tmp_path, way="torch.save")
    paste = pause_of(tmp_path).fixes[0].paste
    assert f'fd.Checkpointer("checkpoints", model, optimizer, every_steps={EVERY})' in paste, paste


@pytest.mark.timeout(150)
def test_who_has_a_checkpointer_is_not_told_to_use_one(tmp_path: Path) -> None:
    train(directory=tmp_path, way="checkpointer")
    fixes = pause_of(tmp_path).fixes
    assert not any("fd.Checkpointer(" in fix.paste for fix in fixes), fixes
    assert [fix.paste for fix in fixes] == ["", 'if_busy="skip"  # argument of fd.Checkpointer'], fixes
