"""The search with Optuna: trials are jobs, bad ones are pruned, and a search that was killed goes on."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WAIT_SECONDS = 90.0


def search(tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    """Start the example, with a good trial and a very bad one first."""
    script = str(EXAMPLES / "optuna_search.py")
    firsts = ["--first", "16", "0.5", "--first", "16", "30"]
    return subprocess.Popen(
        [sys.executable, script, "--study", "s.db", "--seconds", "0.4", *firsts, *words],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def wait_for(what: str, happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not happened():
        assert time.monotonic() < deadline, f"{what}: not within {WAIT_SECONDS} s"
        time.sleep(0.05)


@pytest.mark.full("slow")
@pytest.mark.timeout(4 * WAIT_SECONDS)
def test_a_search_with_optuna_is_killed_and_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="needs pip install optuna")
    first = search(tmp_path, "--trials", "2")
    try:
        wait_for("the second trial", (tmp_path / "s.runs" / "trial-001" / "output.txt").exists)
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    with sqlite3.connect(tmp_path / "s.db") as study:
        states = [state for (state,) in study.execute("select state from trials order by number")]
    assert states[:2] == ["COMPLETE", "RUNNING"], f"one trial is over, and one was cut short: {states}"
    second = search(tmp_path, "--trials", "2")
    text, _ = second.communicate(timeout=3 * WAIT_SECONDS)
    assert second.returncode == 0, text
    assert "trial 1 was cut short: {'batch_size': 16, 'lr': 30.0} is tried again" in text, text
    assert re.search(r"trial \d pruned: batch 16, lr 30", text), f"a learning rate of 30 is given up: {text}"
    match = re.search(r"best: batch 16 a rank, lr 0.5, loss (\d\.\d+)", text)
    assert match is not None, text
    assert float(match[1]) < 5.3, "it has learned: a guess among 256 bytes has 5.55"
    best = re.search(r"farandole report s.runs/(trial-\d+)", text)
    assert best is not None, text
    assert (tmp_path / "s.runs" / best[1] / "metrics.jsonl").is_file(), "each trial is a run"


@pytest.mark.full("further")
@pytest.mark.timeout(4 * WAIT_SECONDS)
def test_trials_that_fail_are_recorded_and_end_the_search_at_last(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="needs pip install optuna")
    failed = search(tmp_path, "--trials", "2", "--ranks", "0")
    text, _ = failed.communicate(timeout=3 * WAIT_SECONDS)
    assert failed.returncode == 1, text
    assert len(re.findall(r"trial \d fail", text)) == 3, text
    assert "three trials failed one after the other: see s.runs/*/output.txt" in text, text
