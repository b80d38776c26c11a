"""What a person is told who started ranks in a way that cannot work, or has no terminal: with real processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import warm
from tests.ranks.test_launch import script

UNGUARDED = """
import farandole as fd
from torch.utils.data import DataLoader
fd.init()
if __name__ == "__main__":
    for batch in DataLoader(range(4), num_workers=1, multiprocessing_context="spawn"):
        pass
"""


@pytest.mark.timeout(100)
def test_the_workers_of_a_script_without_a_guard_are_the_cause(tmp_path: Path) -> None:
    name = script(tmp_path, UNGUARDED)
    result = warm.run(tmp_path, "run", "-np", "2", "--", sys.executable, name, timeout=80)
    assert result.returncode == 2, result.stderr
    assert "this is a spawned worker of rank" in result.stderr.splitlines()[0]
    assert "under if __name__ == '__main__'" in result.stderr
    assert "Traceback" not in result.stderr
