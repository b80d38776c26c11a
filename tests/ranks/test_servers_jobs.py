"""Jobs with servers whose ranks die: the others go on, and nothing is left."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import warm
from tests.ranks.pool import _place, free_port, patient
from tests.ranks.started import started
from tests.ranks.test_launch import FARANDOLE
from tests.warm import run

SCRIPT = """
import os, signal, sys, time, torch, farandole as fd
from torch import nn
from farandole.parallel.model import DistributedModel
asks = "asks" in sys.argv
if "before init" in sys.argv and os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
sync, steps, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
here = fd.init(timeout_seconds=20)
if "before a step" in sys.argv and here.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
fd.distribute(model, optimizer, fd.Plan(sync=sync) if sync != "launched" else None)
servers = DistributedModel.of(model).policy.remote.servers
print("servers", *[each.pid for each in servers.started], flush=True)
for step in range(1, steps + 1):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + here.rank)).double()
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert not asks or not fd.preempted()
    time.sleep(pause)
    if step == 5:
        print("five", flush=True)
        if here.rank == int(sys.argv[4]):
            os.kill(os.getpid(), signal.SIGKILL)
fd.drain(model)
print("end", float(sum(each.double().sum() for each in model.parameters())), flush=True)
print("done", flush=True)
DistributedModel.of(model).policy.close()
"""


def alive(process: int) -> bool:
    """Whether a process runs that is no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(processes: list[int], seconds: float) -> None:
    until = time.monotonic() + seconds
    while left := [each for each in processes if alive(each)]:
        assert time.monotonic() < until, f"{left} are there after {seconds} s"
        time.sleep(0.05)


@pytest.mark.full("slow")
@patient
@pytest.mark.parametrize(("sync", "killed"), [("server:staleness=0,servers=2", 1), ("server:staleness=2", 0)])
def test_a_rank_that_is_killed_costs_no_step_of_the_others(sync: str, killed: int, tmp_path: Path) -> None:
    """Rank 1 has started a server too; rank 0 has the only one, and serves the store."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    port = free_port()
    with started(
        tmp_path, [str(script), sync, "40", "0.05", "-1"], [_place(i, 3, port) for i in range(3)]
    ) as ranks:
        ranks[killed].wait_for("five")
        os.kill(ranks[killed].process.pid, signal.SIGKILL)
        others = [each for each in ranks if each is not ranks[killed]]
        for each in others:
            each.wait_for("done")
        ends = {line for each in others for line in each.out.splitlines() if line.startswith("end")}
        assert len(ends) == 1
        servers = [int(word) for each in ranks for word in each.out.splitlines()[0].split()[1:]]
        assert len(servers) == (2 if "servers=2" in sync else 1)
        wait_until_gone(servers, 10)


@pytest.mark.full("slow")
@patient
def test_no_server_outlives_a_job_however_it_ends(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    port = free_port()
    with started(tmp_path, [str(script), "async:servers=2", "9999", "0.01", "-1"],
                 [_place(i, 2, port) for i in range(2)]) as ranks:  # fmt: skip
        for each in ranks:
            each.wait_for("five")
        servers = [int(word) for each in ranks for word in each.out.splitlines()[0].split()[1:]]
        assert len(servers) == 2
        assert all(map(alive, servers))
        for each in ranks:
            os.kill(each.process.pid, signal.SIGKILL)
        wait_until_gone(servers, 10)


@pytest.mark.full("slow")
@patient
def test_a_job_of_the_launcher_ends_with_its_servers(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = run(
        tmp_path, "run", "-np", "2", "--", sys.executable, str(script), "server:staleness=1", "20", "0", "-1"
    )
    assert done.returncode == 0, done.stderr
    servers = [
        int(word)
        for line in done.stdout.splitlines()
        if "servers" in line
        for word in line.split("servers")[1].split()
    ]
    assert len(servers) == 1
    wait_until_gone(servers, 5)  # its last client has seen it close, and a busy machine may take a moment
    assert "pushes by their staleness" in done.stderr


@pytest.mark.full("slow")
@patient
def test_the_launcher_lets_the_others_go_on_without_a_rank_that_is_killed_unless_it_is_rank_0(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    for killed in (2, 0):
        done = run(
            tmp_path, "run", "-np", "3", "--set", "sync=server:staleness=2", "--", sys.executable, str(script),
            "launched", "30", "0.02", str(killed),
        )  # fmt: skip
        if killed:
            assert done.returncode == 0, done.stderr
            assert "rank 2 was killed by SIGKILL: the others go on without it" in done.stderr
            assert done.stdout.count("done") == 2
        else:
            assert done.returncode == 137, done.stderr
            assert "rank 0" in done.stderr


@pytest.mark.gate_cases("before a step")
@pytest.mark.full_cases("asks")
@patient
@pytest.mark.parametrize("when", ["before init", "before a step", "asks"])
def test_a_rank_that_the_others_need_ends_the_job_when_it_is_killed(when: str, tmp_path: Path) -> None:
    """It has not made a step yet, or the loop asks all ranks in each step."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = run(
        tmp_path, "run", "-np", "2", "--set", "sync=server:staleness=2", "--", sys.executable, str(script),
        "launched", "30", "0.02", "1", when,
    )  # fmt: skip
    assert "rank 1 on" in done.stderr
    assert "failed: killed by signal 9 (SIGKILL)" in done.stderr, done.stderr
    assert "go on without it" not in done.stderr
    assert done.returncode == 137, done.stderr


def servers_of(launcher: int) -> list[int]:
    """Return the processes of servers that the ranks of a job have started."""
    found = psutil.Process(launcher).children(recursive=True)
    return [each.pid for each in found if any("farandole.sync.server" in word for word in each.cmdline())]


@pytest.mark.full("busy")
@patient
@pytest.mark.parametrize("end", ["interrupted", "launcher killed", "ranks killed", "while it imports"])
def test_servers_are_gone_within_two_seconds_of_their_job(end: str, tmp_path: Path) -> None:
    script, out = tmp_path / "train.py", tmp_path / "out"
    script.write_text(SCRIPT)
    words = [
        *FARANDOLE[1:],
        "run",
        "-np",
        "2",
        "--run-dir",
        str(tmp_path / "run"),
        "--",
        sys.executable,
        str(script),
    ]
    with out.open("w") as to, (tmp_path / "err").open("w") as err:
        launcher = warm.start(tmp_path, *words, "server:staleness=2", "9999", "0.02", "-1", out=to, err=err)
        until = time.monotonic() + 60
        while "five" not in out.read_text() if end != "while it imports" else not servers_of(launcher.pid):
            assert launcher.poll() is None, (tmp_path / "err").read_text()
            assert time.monotonic() < until
            time.sleep(0.01)
        servers = servers_of(launcher.pid)
        assert len(servers) == 1
        if end == "ranks killed":
            for each in psutil.Process(launcher.pid).children(recursive=True):
                if each.ppid() == launcher.pid and each.pid not in servers:
                    each.kill()
        else:
            os.kill(launcher.pid, signal.SIGINT if end == "interrupted" else signal.SIGKILL)
        launcher.wait(20)
    wait_until_gone(servers, 2)
    assert not list((tmp_path / "run").glob("farandole-server-*"))
