"""The demo end to end, with few steps, on text and on images."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.bench.test_data import FASHION
from tests.warm import run


@pytest.mark.full("slow")
@pytest.mark.timeout(150)
def test_the_demo_on_text(tmp_path: Path) -> None:
    result = run(tmp_path, "demo", "--steps", "6", "--run-dir", "d", timeout=140)
    assert result.returncode == 0, result.stderr
    assert "At equal samples they trained the same curve" in result.stdout
    assert "verify: the ranks hold the same bits" in result.stdout
    assert "2 processes are" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert {path.name for path in (tmp_path / "d").iterdir()} == {"np1", "np2", "verify", "report.html"}
    assert "one process" in (tmp_path / "d" / "report.html").read_text()


@pytest.mark.full("slow")
@pytest.mark.timeout(150)
def test_the_demo_on_images(tmp_path: Path) -> None:
    if not FASHION.is_dir():
        pytest.skip("needs Debian's dataset-fashion-mnist")
    words = ["demo", "--dataset", "fashion-mnist", str(FASHION), "--steps", "20", "--json"]
    result = run(tmp_path, *words, timeout=140)
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert answer["largest_loss_difference"] < 1e-3
    assert answer["verification"]["passed"]
    assert answer["two_processes"]["last_loss"] < 0.8 * answer["one_process"]["first_loss"]


@pytest.mark.full("further")
@pytest.mark.timeout(150)
def test_the_demo_on_a_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"short")
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(b"short")
    result = run(tmp_path, "demo", "--dataset", "fashion-mnist", str(tmp_path), "--steps", "8", timeout=60)
    assert result.returncode == 1
    assert "train-images-idx3-ubyte: begins with 73686f72, expected an IDX header" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.full("further")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_demo_that_is_stopped_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    mark = str(tmp_path / "run")
    demo = subprocess.Popen(
        [sys.executable, "-m", "farandole", "demo", "--run-dir", mark],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until(lambda: len(processes_with(mark)) >= 3, "the demo, its launcher and a rank run")
        demo.send_signal(number)
        demo.wait(10)
        until(lambda: not processes_with(mark), "all are gone")
    finally:
        for process in processes_with(mark):
            os.kill(process, signal.SIGKILL)


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, f"not so after 20 s: {what}"
        time.sleep(0.05)


def processes_with(mark: str) -> list[int]:
    """Return the living processes that have `mark` in their command or environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            alive = "\nState:\tZ" not in (entry / "status").read_text()
            told = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if alive and mark.encode() in told:
            found.append(int(entry.name))
    return found
