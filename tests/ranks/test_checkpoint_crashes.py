"""A save is killed at its system calls, and a new run finds a whole checkpoint each time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs.checkpoint_crashes import why_impossible

pytestmark = pytest.mark.full("slow")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("ranks", "every", "least"), [(1, 3, 20), (2, 24, 4)])
def test_a_save_killed_at_its_system_calls_leaves_a_whole_checkpoint(
    tmp_path: Path, ranks: int, every: int, least: int
) -> None:
    """`benchmarks/checkpoint_crashes.py` kills at every call."""
    if reason := why_impossible():
        pytest.skip(reason)
    words = [
        "-m",
        "tests.programs.checkpoint_crashes",
        str(tmp_path),
        "--ranks",
        str(ranks),
        "--every",
        str(every),
    ]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not found["faults"]
    assert found["kills"] >= least, found
    assert found["old"] + found["new"] == found["kills"]
