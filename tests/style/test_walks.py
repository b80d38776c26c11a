"""How many files of the source are entered by a step, a call or a command, and which a plan passes to a rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.style.ceilings import ceilings
from tests.style.entered import of_a_job, of_a_plan, of_a_training
from tests.style.walks import walk_over_ssh

MOST_ENTERED, MOST_CARRYING = 64, 16
"""Of launcher, agents and ranks together: of the walk over ssh, where imports count. They may only be lowered."""


@pytest.mark.timeout(240)
def test_the_walk_of_a_plan_gets_no_longer(tmp_path: Path) -> None:
    walk = walk_over_ssh(tmp_path)
    assert {"cli/main", "launch/ssh/frames", "core/job_plan"} <= walk.carrying
    assert len(walk.carrying) <= MOST_CARRYING, sorted(walk.carrying)
    assert len(walk.entered) <= MOST_ENTERED, sorted(walk.entered)


@pytest.mark.timeout(240)
def test_a_step_and_distribute_enter_no_more_files(tmp_path: Path) -> None:
    found = of_a_training(tmp_path)
    for part, file in (("step", "parallel/model"), ("distribute", "parallel/distribute")):
        assert file in found[part]
        require(f"walk of {part}", found[part])


@pytest.mark.full("slow")
def test_a_save_a_load_a_job_and_a_plan_enter_no_more_files(tmp_path: Path) -> None:
    found = of_a_training(tmp_path)
    for part in ("save", "load"):
        require(f"walk of {part}", found[part])
    require("walk of a job until its ranks run", of_a_job(tmp_path))
    require("walk of farandole plan", of_a_plan(tmp_path))


def require(name: str, files: set[str]) -> None:
    assert len(files) <= ceilings()[name], (name, len(files), sorted(files))
