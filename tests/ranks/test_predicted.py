"""Runs of plans that predict: the closing summary shows predicted against measured, by term."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from farandole.core.vocabulary.spec import Plan
from tests import warm
from tests.ranks.test_launch import script

DATA = """
import time, torch, farandole as fd
fd.init()
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64))
model, optimizer = fd.distribute(model, torch.optim.AdamW(model.parameters()))
for step in range(20):
    optimizer.zero_grad()
    model(torch.ones(2048, 512, dtype=torch.float32)).square().mean().backward()
    optimizer.step()
    time.sleep(0.06)
"""
TENSOR = """
import torch, farandole as fd
fd.init()
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
recipe = {"0": "columns", "2": "rows"}
predicted = {"step_seconds": 0.01, "compute": 0.006, "tensor": 0.003, "optimizer": 0.001, "ranks": 2}
plan = fd.Plan(tensor=2, tensor_recipe=recipe, predicted=predicted)
model, optimizer = fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), plan)
for step in range(15):
    optimizer.zero_grad()
    model(torch.ones(8, 64, dtype=torch.float32)).square().mean().backward()
    optimizer.step()
"""


def summary_of(tmp_path: Path, text: str, *options: str) -> tuple[dict[str, Any], str]:
    run = tmp_path / "run"
    result = warm.run(
        tmp_path, "run", "-np", "2", "--run-dir", str(run), *options, "--", sys.executable, script(tmp_path, text)
    )
    assert result.returncode == 0, result.stderr
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary["prediction"], result.stderr


@pytest.mark.full("slow")
def test_a_plans_prediction_is_shown_beside_what_was_measured(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    predicted = {
        "step_seconds": 30.0,
        "low_seconds": 20.0,
        "compute": 29.0,
        "data": 1.0,
        "peak_bytes": 3e7,
        "ranks": 2,
    }
    plan.write_text(Plan(predicted=predicted).to_toml())
    check, text = summary_of(tmp_path, DATA, "--plan", str(plan))
    assert check["step"]["predicted_seconds"] == 30.0
    assert check["is_inside"] is False, "a step takes no 20 s"
    assert check["most_off"] == "compute"
    by_name = {each["name"]: each for each in check["terms"]}
    measured = sum(each["measured_seconds"] or 0.0 for each in by_name.values())
    assert 0.95 < measured / check["step"]["measured_seconds"] < 1.01, by_name
    assert by_name["not predicted"]["measured_seconds"] >= 0.059, "the script sleeps"
    assert 5e6 < check["peak"]["measured_bytes"] < 200e6, "the activations of a batch are 13 MB"
    assert "compute is most off" in text
    assert "farandole measure --from" in text


@pytest.mark.full("slow")
def test_exchanges_inside_of_passes_are_measured_and_a_plan_of_the_script_counts(tmp_path: Path) -> None:
    check, text = summary_of(tmp_path, TENSOR)
    by_name = {each["name"]: each for each in check["terms"]}
    assert by_name["tensor exchange"]["measured_seconds"] > 0
    assert by_name["tensor exchange"]["predicted_seconds"] == 0.003
    assert by_name["compute"]["terms"] == ["compute"], "they are told apart"
    assert "tensor exchange" in text
