"""`farandole bench` on real ranks of this host: a user's script at two sizes, a model of images, a suite."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from farandole.bench.suite.entries import SUITES, Entry
from farandole.bench.suite.suite import run_suite
from tests.ranks.test_launch import script
from tests.warm import run

SLEEPS = """
import sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import farandole as fd

fd.init()
model = nn.Linear(5, 1)
model, optimizer = fd.distribute(model, torch.optim.SGD(model.parameters(), 0.05))
x = torch.randn(400, 5)
batch = int(sys.argv[1])
for step, (a,) in enumerate(fd.shard(DataLoader(TensorDataset(x), batch_size=batch))):
    if step == 14:
        break
    time.sleep(0.02 * batch)
    optimizer.zero_grad()
    model(a).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.timeout(200)
def test_scaling_of_a_script_whose_compute_is_known(tmp_path: Path) -> None:
    done = run(
        tmp_path, "bench", "scaling", "--np", "1,2", "--rounds", "1", "--mode", "strong", "--batch", "8",
        "--html", "s.html", "--output", "s.json", "--", sys.executable, script(tmp_path, SLEEPS), "{batch}",
        timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:3] == ["ranks", "scaling", "training"]
    one, two = json.loads((tmp_path / "s.json").read_text())["rows"]
    assert (one["ranks"], two["ranks"], two["beside_ranks"]) == (1, 2, 1)
    assert one["step_seconds"] > 0.16
    assert 0.08 < two["step_seconds"] < 0.16, "half the batch"
    assert 1.2 < two["speedup"] < 2.1
    assert two["efficiency"] == pytest.approx(two["speedup"] / 2)
    assert two["samples_per_second"] == pytest.approx(8 / two["step_seconds"], rel=0.2)
    assert 1 <= two["warm_up_steps"] <= 10
    assert (tmp_path / "s.html").stat().st_size > 3000
    assert not list(tmp_path.glob("runs")), "its runs are gone"


@pytest.mark.timeout(200)
def test_scaling_says_which_run_failed(tmp_path: Path) -> None:
    text = "import os, sys; sys.exit(7 if os.environ['WORLD_SIZE'] == '2' else 0)"
    kept = {"TMPDIR": str(tmp_path)}
    done = run(
        tmp_path, "bench", "scaling", "--np", "2,4", "--", sys.executable, script(tmp_path, text),
        timeout=90, environment=kept,
    )  # fmt: skip
    assert done.returncode == 1
    assert "the script failed on 2 rank(s) (exit code" in done.stderr.splitlines()[-1]
    assert "no numbers for 4 ranks: 0 of 4 ranks recorded steps" in done.stderr, "the other size has its try"
    assert len(list(tmp_path.glob("farandole-scaling-*/run/logs"))) == 1, "of the run that failed"
    silent = run(tmp_path, "bench", "scaling", "--np", "1,2", "--", sys.executable, script(tmp_path, "pass"))
    assert silent.returncode == 2
    assert "0 of 1 ranks recorded steps" in silent.stderr.splitlines()[-1]


@pytest.mark.timeout(200)
def test_a_step_of_images_in_16_bits_with_mllog(tmp_path: Path) -> None:
    done = run(
        tmp_path, "bench", "step", "--hosts", "1", "--slots", "2", "--rate", "none", "--model", "cifar-cnn",
        "--batch", "4", "--precision", "fp16", "--contenders", "ddp;none", "--rounds", "2",
        "--mllog", "m.log", "--json", timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["model"], found["precision"], found["parameters"]) == ("cifar-cnn", "fp16", 268_650)
    assert found["command"][:5] == ["farandole", "bench", "step", "--hosts", "1"]
    assert found["machine"]["versions"]["torch"]
    assert [row["contender"] for row in found["rows"]] == ["ddp", "none"]
    for row in found["rows"]:
        assert row["samples_per_second"] == pytest.approx(8 / row["seconds"])
    assert found["rows"][0]["loss"] == pytest.approx(found["rows"][1]["loss"], rel=0.02)
    lines = (tmp_path / "m.log").read_text().splitlines()
    keys = [json.loads(line.removeprefix(":::MLLOG "))["key"] for line in lines]
    assert keys.count("tracked_stats") == 4
    assert keys[-1] == "run_stop"


@pytest.mark.timeout(200)
def test_a_suite_that_is_told_to_end_takes_its_benchmark_with_it(tmp_path: Path) -> None:
    """The signal goes to the suite alone, as a scheduler's does; its children are in sessions of their own."""
    kept = tmp_path / "temporary"
    kept.mkdir()
    command = [
        sys.executable,
        "-m",
        "farandole",
        "bench",
        "suite",
        "--suite",
        "quick",
        "--rate",
        "none",
        "-o",
        "r.md",
    ]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(kept)},
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    with process:
        assert process.stderr is not None
        assert any(b"2 ranks on this host" in line for line in process.stderr), "it has begun"
        deadline = time.monotonic() + 60
        while not list(kept.glob("*/run/logs/rank_1.log")) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.terminate()
        process.stderr.read()  # ends when the last process that writes there has
        assert process.wait(60) == 143
    assert not list(kept.glob("farandole-*"))
    assert not (tmp_path / "r.md").exists(), "it had nothing to say yet"


def test_a_suite_goes_on_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = (
        Entry("Fails", ("codecs", "--rounds", "0")),
        Entry("Runs", ("codecs", "--codecs", "sign", "--rounds", "1")),
    )
    monkeypatch.setitem(SUITES, "tiny", entries)
    said: list[str] = []
    result = run_suite("tiny", "none", tmp_path / "r.md", say=said.append)
    assert len(said) == 2
    assert result["entries"][0]["failed"].startswith("exit code 2")
    page = (tmp_path / "r.md").read_text()
    assert "| codec | GB/s |" in page
    assert "| sign:block=512 |" in page
    assert json.loads((tmp_path / "r.json").read_text())["entries"][1]["result"]["rows"]
