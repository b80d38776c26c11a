"""Scripts that `farandole init` has changed train on two ranks, and `farandole verify` finds them in order."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from farandole.launch.adapt.propose import propose
from tests import warm
from tests.unit.launch.training_scripts import CAN


@pytest.mark.parametrize("name", ["functions", "trainer_class", "gan", "amp", "helpers", "two_optimizers"])
def test_a_changed_script_is_in_order(name: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(CAN[name])
    script.write_text(propose(script).after)
    result = warm.run(tmp_path, "verify", "-np", "2", "--", sys.executable, "train.py")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "All in order." in result.stdout


def test_a_changed_script_runs_to_its_end(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(CAN["eval_first"])
    script.write_text(propose(script).after)
    result = warm.run(tmp_path, "run", "-np", "2", "--", sys.executable, "train.py")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "8 steps, 2 ranks" in result.stderr
