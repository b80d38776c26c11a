"""How many files of the source a plan passes on its way from the command line to a rank over ssh."""

from __future__ import annotations

from pathlib import Path

from tests.style.walks import walk_over_ssh

MOST_ENTERED, MOST_CARRYING = 82, 15
"""Of launcher, agents and ranks together. They may only be lowered, but for a new idea: degrees made 77 to 78,
names of schedules and what a plan predicts 80, when replicas agree 81, and degrees that are refused at once 82."""


def test_the_walk_of_a_plan_gets_no_longer(tmp_path: Path) -> None:
    walk = walk_over_ssh(tmp_path)
    assert {"cli/main", "launch/ssh/link/frames", "core/environ/job_plan"} <= walk.carrying
    assert len(walk.carrying) <= MOST_CARRYING, sorted(walk.carrying)
    assert len(walk.entered) <= MOST_ENTERED, sorted(walk.entered)
