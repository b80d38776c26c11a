"""What docs/fit/memory.md says that ranks hold, measured again for one row."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.warm import run

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.full("slow")
@pytest.mark.timeout(120)
def test_a_rank_at_stage_3_holds_what_the_page_says(tmp_path: Path) -> None:
    row = re.search(
        r"\| `zero = 3` \| ([\d.]+) .*?\| ([\d.]+) .*?\| ([\d.]+) ", (ROOT / "docs/fit/memory.md").read_text()
    )
    assert row is not None, "the table of docs/fit/memory.md has a row of stage 3"
    script = str(ROOT / "benchmarks" / "memory_by_category.py")
    done = run(tmp_path, "run", "-np", "2", "--set", "zero=3", "--", sys.executable, script, timeout=100)
    assert done.returncode == 0, done.stderr
    found = re.search(r"weights ([\d.]+) MB, gradients ([\d.]+) MB, optimizer ([\d.]+) MB", done.stdout)
    assert found is not None, done.stdout
    for said, measured in zip(row.groups(), found.groups(), strict=True):
        assert float(measured) == pytest.approx(float(said), rel=0.02), found[0]
