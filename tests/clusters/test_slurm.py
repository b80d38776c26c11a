"""The same script under a real Slurm: srun of ranks and of nodes, batch scripts, the warning before the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole.core.slurm import expand_node_list

from .scripts import HOROVOD_PLACE, PLACE, TOLD, UNTIL_WARNED, printed, write
from .slurm_cluster import Cluster, slurm_cluster, why_impossible

FARANDOLE = (sys.executable, "-m", "farandole")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if reason := why_impossible():
        pytest.skip(reason)
    with slurm_cluster() as started:
        yield started


@pytest.mark.full("slow")
def test_srun_starts_the_ranks(cluster: Cluster, tmp_path: Path) -> None:
    done = cluster.run(
        "srun", "-N2", "-n2", "--ntasks-per-node=1", sys.executable, write(tmp_path, PLACE), directory=tmp_path
    )
    assert done.returncode == 0, done.stderr + cluster.logs()
    assert printed(done.stdout) == [[0, 2, 0, 1, 0, 2, "Slurm", 0.5], [1, 2, 0, 1, 1, 2, "Slurm", 0.5]]


@pytest.mark.full("slow")
def test_srun_starts_a_script_of_horovods_names(cluster: Cluster, tmp_path: Path) -> None:
    done = cluster.run(
        "srun", "-N2", "-n2", "--ntasks-per-node=1", sys.executable, write(tmp_path, HOROVOD_PLACE),
        directory=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + cluster.logs()
    assert printed(done.stdout) == [[0, 2, 0, 1, 0, 2, 3.0], [1, 2, 0, 1, 1, 2, 3.0]]


def test_srun_starts_the_nodes_and_they_the_ranks(cluster: Cluster, tmp_path: Path) -> None:
    done = cluster.run(
        "srun", "-N2", "--ntasks-per-node=1", *FARANDOLE, "run", "-np", "4", "--no-bind", "--quiet", "--run-dir",
        "kept", "--", "python", write(tmp_path, TOLD), directory=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + cluster.logs()
    assert printed(done.stdout) == [
        [0, 4, 0, 2, 0, 2], [1, 4, 1, 2, 0, 2], [2, 4, 0, 2, 1, 2], [3, 4, 1, 2, 1, 2],
    ]  # fmt: skip
    assert (tmp_path / "kept" / "logs" / "rank_1.log").read_text().startswith("[1, 4")
    assert (tmp_path / "kept-node1" / "logs" / "rank_2.log").read_text().startswith("[2, 4")
    assert not (tmp_path / "kept-node1" / "logs" / "rank_0.log").exists()


def test_a_failure_on_one_node_ends_the_step_and_is_named(cluster: Cluster, tmp_path: Path) -> None:
    text = """
import os, time
if os.environ["RANK"] == "1":
    raise KeyError("the culprit")
time.sleep(600)
"""
    begin = time.monotonic()
    done = cluster.run(
        "srun", "-N2", "--ntasks-per-node=1", "--kill-on-bad-exit=1", *FARANDOLE, "run", "-np", "2",
        "--no-bind", "--", "python", write(tmp_path, text), directory=tmp_path,
    )  # fmt: skip
    assert done.returncode != 0
    assert "farandole: rank 1 on " in done.stderr
    assert "failed: KeyError: 'the culprit'" in done.stderr
    assert time.monotonic() - begin < 20


@pytest.mark.full("slow")
def test_a_batch_script_is_handed_in_and_runs(cluster: Cluster, tmp_path: Path) -> None:
    handed_in = cluster.run(
        *FARANDOLE, "run", "--on", "slurm", "-np", "2", "--nodes", "2", "--time", "5", "--queue", "debug",
        "--quiet", "--no-bind", "--", "python", write(tmp_path, PLACE), directory=tmp_path,
    )  # fmt: skip
    assert handed_in.returncode == 0, handed_in.stderr
    job = handed_in.stdout.strip()
    assert job.isdecimal()
    cluster.wait_for(job, tmp_path)
    out = (tmp_path / f"slurm-{job}.out").read_text()
    assert [each[:2] for each in printed(out)] == [[0, 2], [1, 2]], out


@pytest.mark.full("further")
def test_inside_an_allocation_srun_is_run(cluster: Cluster, tmp_path: Path) -> None:
    write(tmp_path, "import os\nprint('rank', os.environ['RANK'], 'node', os.environ['SLURM_NODEID'])\n")
    done = cluster.run(
        "salloc", "-N2", "--ntasks-per-node=1", *FARANDOLE, "run", "--on", "slurm", "-np", "2", "--quiet",
        "--no-bind", "train.py", directory=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(line.split("] ")[1] for line in done.stdout.splitlines()) == ["rank 0 node 0", "rank 1 node 1"]
    refused = cluster.run(
        "salloc",
        "-N1",
        *FARANDOLE,
        "run",
        "--on",
        "slurm",
        "-np",
        "2",
        "--nodes",
        "2",
        "train.py",
        directory=tmp_path,
    )
    assert "--nodes 2: this allocation of Slurm has 1" in refused.stderr


@pytest.mark.full("slow")
def test_a_warning_reaches_the_loops_of_all_ranks(cluster: Cluster, tmp_path: Path) -> None:
    write(tmp_path, UNTIL_WARNED)
    step = cluster.start(
        "srun", "-N2", "--ntasks-per-node=1", *FARANDOLE, "run", "-np", "2", "--quiet", "--no-bind", "--",
        "python", "train.py", directory=tmp_path,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 40
        while not (tmp_path / "looping").exists():
            assert time.monotonic() < deadline, "the loop did not begin"
            assert step.poll() is None, step.communicate()
            time.sleep(0.1)
        job = cluster.run("squeue", "-h", "-o", "%A", directory=tmp_path).stdout.split()[0]
        assert cluster.run("scancel", "--signal=USR1", job, directory=tmp_path).returncode == 0
        out, err = step.communicate(timeout=20)
    finally:
        step.kill()
        step.wait()
    assert step.returncode == 0, err
    saved = sorted(line.split("saved ")[1].split() for line in out.splitlines())
    assert [rank for rank, _ in saved] == ["0", "1"]
    assert saved[0][1] == saved[1][1], "all ranks leave the loop at the same step"


@pytest.mark.parametrize("text", ["node[1-3,07],gpu5", "n[098-101]", "rack[1-2]-[3,5]", "a"])
def test_lists_of_nodes_are_what_slurm_says(cluster: Cluster, tmp_path: Path, text: str) -> None:
    told = cluster.run("scontrol", "show", "hostnames", text, directory=tmp_path).stdout.split()
    assert expand_node_list(text) == told
