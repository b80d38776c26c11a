"""`farandole bench` on real ranks of this host: a user's script at two sizes, a model of images."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

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
x = torch.randn(400, 5, generator=torch.Generator().manual_seed(0))
batch = int(sys.argv[1])
for step, (a,) in enumerate(fd.shard(DataLoader(TensorDataset(x), batch_size=batch))):
    if step == 14:
        break
    time.sleep(0.02 * batch)
    optimizer.zero_grad()
    model(a).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.full("slow")
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


@pytest.mark.full("slow")
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


@pytest.mark.full("further")
@pytest.mark.timeout(200)
def test_a_step_of_images_in_16_bits(tmp_path: Path) -> None:
    done = run(
        tmp_path, "bench", "step", "--hosts", "1", "--slots", "2", "--rate", "none", "--model", "cifar-cnn",
        "--batch", "4", "--precision", "fp16", "--contenders", "ddp;none", "--rounds", "2",
        "--json", timeout=180,
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
