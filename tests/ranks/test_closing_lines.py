"""How a run ends: the verdict in one line and the next command; and how soon its first progress comes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from farandole.cli.commands.run import _what_next
from farandole.observe.diagnose import brief
from farandole.observe.diagnose.verdict import diagnose
from tests import warm
from tests.ranks.test_launch import script
from tests.unit.observe.phased_run import make_phased_run

TRAINS = """
import time, torch, farandole as fd
fd.init()
model = torch.nn.Linear(4, 1)
model, optimizer = fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
for step in range(40):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.1)
"""


def test_a_run_ends_with_its_verdict_and_the_next_command(tmp_path: Path) -> None:
    result = warm.run(
        tmp_path, "run", "-np", "2", "--run-dir", "a run", "--", sys.executable, script(tmp_path, TRAINS)
    )
    assert result.returncode == 0, result.stderr
    verdict, directory, following = result.stderr.rstrip().splitlines()[-3:]
    assert verdict == f"{'verdict':<24} {diagnose(tmp_path / 'a run').verdict}"
    assert directory.startswith("run directory")
    assert following == f"{'next':<24} farandole diagnose 'a run'"
    first = re.search(r"^step (\d+)", result.stderr, re.M)
    assert first, result.stderr
    assert int(first[1]) < 25, "the first line comes early in 4 s, not after 10 s"


def test_long_records_are_not_read_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_phased_run(tmp_path / "r", steps=60)
    monkeypatch.chdir(tmp_path)
    assert _what_next(run).startswith("verdict ")
    monkeypatch.setattr(brief, "MOST_BYTES", 1000)
    assert brief.brief_verdict(run) == ""
    assert _what_next(run).splitlines() == [f"{'run directory':<24} {run}", f"{'next':<24} farandole diagnose r"]


def test_two_thousand_steps_still_have_a_verdict(tmp_path: Path) -> None:
    run = make_phased_run(tmp_path / "r", steps=2000)
    assert brief.brief_verdict(run)
