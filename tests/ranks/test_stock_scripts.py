"""``farandole run --backend farandole``: scripts that ask for gloo get Farandole's groups, others do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from farandole.launch.job.contract import SHIM, JobSpec, RankSpec, rank_environment
from tests import warm
from tests.ranks import stock_script
from tests.ranks.pool import patient

SCRIPT = str(Path(stock_script.__file__))
NOTICE = "process groups for CPU tensors are Farandole's instead of gloo's (--backend farandole)"


@pytest.mark.full("slow")
@patient
def test_a_script_that_asks_for_gloo_gets_ours_and_the_same_gradients(tmp_path: Path) -> None:
    customised = tmp_path / "of the user"
    customised.mkdir()
    (customised / "sitecustomize.py").write_text("MARK = 'ran'\n")
    cases = ["", "gloo", "cuda:nccl,cpu:gloo"]
    done = warm.run(
        tmp_path, "run", "-np", "2", "--backend", "farandole", "--", sys.executable, SCRIPT, *cases,
        environment={"PYTHONPATH": str(customised)}, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    both = [json.loads(line.partition("] ")[2]) for line in done.stdout.splitlines()]
    assert [told.pop() for told in both] == [{"customised": "ran"}] * 2
    assert [told["config"] for told in both[0]] == [
        "cpu:farandole", "cpu:farandole,cuda:gloo", "cpu:farandole,cuda:nccl",
    ]  # fmt: skip
    assert [told["asked"] for told in both[0]] == ["undefined", "gloo", "cuda:nccl,cpu:gloo"]
    assert [told["names"] for told in both[0]] == [["farandole"] * 3] * 3
    assert done.stderr.count(NOTICE) == 1, "by rank 0, once"

    plain = warm.run(tmp_path, "run", "-np", "2", "--", sys.executable, SCRIPT, "gloo")
    assert plain.returncode == 0, plain.stderr
    assert NOTICE not in plain.stderr
    gloo = json.loads(next(line for line in plain.stdout.splitlines() if "[{" in line).partition("] ")[2])[0]
    assert gloo["names"] == ["gloo"] * 3
    assert [told["gradient"] for told in both[0]] == [gloo["gradient"]] * 3


def test_an_inner_job_may_have_gloo_again() -> None:
    inherited = {"PYTHONPATH": os.pathsep.join(["a", str(SHIM), "b"])}

    def told(**asked: str) -> dict[str, str]:
        job = JobSpec("127.0.0.1", 1, Path("runs"), environment=asked)
        return rank_environment(RankSpec(0, 1, 0, 1), job, inherited)

    ours = {"FARANDOLE_BACKEND": "farandole", "PYTHONPATH": os.pathsep.join([str(SHIM), "a", "b"])}
    assert ours.items() <= told(FARANDOLE_BACKEND="farandole").items()
    # The folder is inherited; the variables decide.
    assert "PYTHONPATH" not in told(FARANDOLE_BACKEND="gloo", FARANDOLE_RECORD="0")
    recorded = told(FARANDOLE_RECORD="1", PYTHONPATH="c")
    assert recorded["PYTHONPATH"] == os.pathsep.join([str(SHIM), "c"])


def test_a_python_without_farandole_does_not_use_gloo_silently(tmp_path: Path) -> None:
    for name in ("torch", "torch/distributed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    path = os.pathsep.join([str(SHIM), str(tmp_path)])
    # -S: without site-packages, where farandole is; sitecustomize has to be named then.
    words = [sys.executable, "-S", "-c", "import sitecustomize, torch; print('torch'); import torch.distributed"]
    done = subprocess.run(
        words,
        env={"PYTHONPATH": path, "FARANDOLE_BACKEND": "farandole"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.stdout == "torch\n"
    assert "has torch but not farandole (No module named 'farandole')" in done.stderr


def test_horovods_front_ends_refuse_it(tmp_path: Path) -> None:
    done = warm.python(
        tmp_path, "-c", "import farandole.horovod.torch as hvd\nhvd.init()",
        environment={"FARANDOLE_BACKEND": "farandole"},
    )  # fmt: skip
    assert done.returncode == 1
    assert "--backend farandole: Horovod's operations are exchanged without" in done.stderr
