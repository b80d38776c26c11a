"""Elastic jobs with real processes: who dies, who goes on and with what, and what is left (nothing)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.ranks.pool import patient
from tests.ranks.test_launch import FARANDOLE, gone_within, run, script

pytestmark = patient

# A worker that plays the launcher's game and imports no torch. Its parts come in argv: what worker N does in
# generation G is "N:G=what"; nothing said: it waits to be told to leave, and is ready again.
PAPER = """
import os, subprocess, sys, time
from farandole.core.env import read_elastic_settings
from farandole.train.elastic import ControlConnection
me = read_elastic_settings()
parts = dict(word.split("=") for word in sys.argv[1:])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(f"pids.{me.worker}", "w").write(f"{os.getpid()} {child.pid}")

def heard(frame):
    if frame is None:
        os._exit(9)
    if frame["type"] == "assignment":
        told = frame["environment"]
        print("generation", frame["generation"], "rank", told["RANK"], "size", told["WORLD_SIZE"], flush=True)
        what = parts.get(f"{me.worker}:{frame['generation']}")
        if what == "hang up":
            line.close()
        if what == "end":
            os._exit(0)
        if what == "die":
            print("Traceback (most recent call last):\\nValueError: the end of it", file=sys.stderr, flush=True)
            os._exit(3)
    if frame["type"] == "leave":
        ready()

def ready():
    line.send({"type": "ready", "progress": 0, "address": "127.0.0.1", "port": 1})

line = ControlConnection(me, heard)
ready()
time.sleep(600)
"""


Ended = tuple[int, str, str]


def elastic(directory: Path, *words: str, runner: Any = run, environment: dict[str, str] | None = None) -> Ended:
    result = runner(directory, "run", "--run-dir", "run", "--quiet", *words, timeout=55, environment=environment)
    return result.returncode, result.stdout, result.stderr


def train(directory: Path, options: str, text: str, *words: str, **named: Any) -> Ended:
    """Run workers that use torch, and end by themselves: what they do is asked here, not how they are started."""
    words = (*options.split(), "--", sys.executable, script(directory, text), *words)
    return elastic(directory, *words, runner=warm.run, **named)


def paper(directory: Path, options: str, *parts: str) -> tuple[int, str, str]:
    name = script(directory, PAPER)
    return elastic(directory, *options.split(), "--", sys.executable, name, *parts)


def pids(directory: Path) -> list[int]:
    return [int(pid) for file in directory.glob("pids.*") for pid in file.read_text().split()]


@pytest.mark.full("further")
def test_too_few_workers_wait_and_give_up(tmp_path: Path) -> None:
    begin = time.monotonic()
    code, out, err = paper(tmp_path, "-np 2 --min-np 2 --elastic-timeout 5", "1:1=die")
    assert code == 3, err
    assert "generation 1 rank 1 size 2" in out
    assert "worker 1 on localhost is gone: ValueError: the end of it; no new workers there" in err
    assert "1 workers are ready after 5 s, and 2 are needed; hosts are localhost:2" in err
    assert time.monotonic() - begin > 5
    assert gone_within(pids(tmp_path), 1)


@pytest.mark.full("further")
def test_the_reset_limit_ends_the_job(tmp_path: Path) -> None:
    code, out, err = paper(tmp_path, "-np 4 --min-np 1 --reset-limit 1", "3:1=die", "2:2=die")
    assert code == 3, err
    assert "generation 2 rank 0 size 3" in out
    assert "generation 3" not in out
    assert "Horovod was shutdown because number of resets during elastic job exceeded limit: 1" in err
    assert gone_within(pids(tmp_path), 1)


@pytest.mark.full("further")
def test_when_all_fail_the_first_failure_is_shown(tmp_path: Path) -> None:
    code, _, err = paper(tmp_path, "-np 2 --min-np 1", "0:1=die", "1:1=die")
    assert code == 3
    assert err.count("every worker that had the state of the job has failed") == 1
    assert "ValueError: the end of it" in err
    assert gone_within(pids(tmp_path), 1)


@pytest.mark.full("further")
def test_a_failed_worker_is_replaced_after_the_cooldown_and_one_success_ends_the_job(tmp_path: Path) -> None:
    ends = [f"{worker}:3=end" for worker in range(3)]
    options = "-np 2 --min-np 2 --blacklist-cooldown-range 1 3 --elastic-timeout 30"
    code, out, err = paper(tmp_path, options, "1:1=die", *[end.replace(":3", ":2") for end in ends])
    assert code == 0, err
    assert re.search(r"\[2\] generation 2 rank 1 size 2", out), out
    assert gone_within(pids(tmp_path), 1)


@pytest.mark.full("further")
def test_a_worker_that_cannot_be_reached_is_stopped(tmp_path: Path) -> None:
    ends = ("0:1=hang up", "1:2=end")
    shorter = "import farandole.launch.elastic.workers as w; w.HUNG_UP_SECONDS = 0.5"
    command = f"{shorter}; from farandole.cli.main import run; import sys; sys.exit(run(sys.argv[1:]))"
    launcher = [sys.executable, "-c", command]
    words = ["run", "-np", "2", "--min-np", "1", "--quiet", "--", sys.executable, script(tmp_path, PAPER), *ends]
    result = subprocess.run(
        [*launcher, *words], cwd=tmp_path, capture_output=True, text=True, timeout=40, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "worker 0 cannot be reached any more and is stopped" in result.stderr
    assert "[1] generation 2 rank 0 size 1" in result.stdout


def start_paper(directory: Path) -> tuple[subprocess.Popen[str], list[int]]:
    process = subprocess.Popen(
        [*FARANDOLE, "run", "-np", "2", "--min-np", "1", "--", sys.executable, script(directory, PAPER)],
        cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 30
    while len(pids(directory)) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    return process, pids(directory)


@pytest.mark.full("further")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_signal_to_the_launcher_leaves_nothing(tmp_path: Path, number: int, code: int) -> None:
    process, started = start_paper(tmp_path)
    assert len(started) == 4
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == code
    assert gone_within(started, 5)


@pytest.mark.full("further")
def test_the_workers_key_is_not_in_the_process_list(tmp_path: Path) -> None:
    process, started = start_paper(tmp_path)
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in [process.pid, *started]]
    keys = [
        re.search(rb"FARANDOLE_ELASTIC_KEY=([0-9a-f]{64})", Path(f"/proc/{pid}/environ").read_bytes())
        for pid in started
    ]
    process.terminate()
    process.communicate(timeout=20)
    found = {key.group(1) for key in keys if key is not None}
    assert len(found) == 2, "each worker has a key of its own"
    assert not any(key in line for line in lines for key in found)
    logs = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert not any(key in logs for key in found)


# Counts to LAST: every step adds one to each weight, exactly, on any number of ranks. Momentum makes the state of
# the optimizer matter. Each commit and each begin leaves a digest of all that was committed.
COUNTS = """
import hashlib, os, sys, time
import torch
import farandole.horovod.torch as hvd
from farandole.train.elastic import member

hvd.init()
last, victims = int(sys.argv[1]), sys.argv[2:]
torch.manual_seed(hvd.rank() + 1)  # ranks begin differently: only rank 0's may count
model = torch.nn.Linear(300, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)

def digest(state):
    found = hashlib.sha256(str(state.batch).encode())
    for tensor in [*model.parameters(), *(s["momentum_buffer"] for s in optimizer.state.values() if s)]:
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()[:16]

@hvd.elastic.run
def train(state):
    print("begin", member().generation, hvd.rank(), hvd.size(), state.batch, digest(state), flush=True)
    while state.batch < last:
        optimizer.zero_grad()
        for i, parameter in enumerate(model.parameters()):
            parameter.grad = hvd.allreduce(-torch.ones_like(parameter), name=f"{i}", op=hvd.Sum) / hvd.size()
        optimizer.step()
        state.batch += 1
        if f"{member().generation}:{hvd.rank()}:{state.batch}" in victims:
            os.kill(os.getpid(), int(os.environ.get("VICTIMS_DIE_BY", "9")))
        if state.batch % 5 == 0:
            print("commit", state.batch, digest(state), flush=True)
            state.commit()
        time.sleep(0.02)

state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0)
train(state)
print("end", hvd.rank(), hvd.size(), state.batch, digest(state), flush=True)
"""


def says(out: str, kind: str) -> list[list[str]]:
    """Return the words after `kind` of the lines that begin with it."""
    return [line.split()[2:] for line in out.splitlines() if line.split()[1:2] == [kind]]


def test_survivors_go_on_from_the_last_commit_until_one_is_left(tmp_path: Path) -> None:
    """Rank 0 is killed in the first generation, and in the second: who was rank 2 ends the job alone."""
    code, out, err = train(tmp_path, "-np 3 --min-np 1", COUNTS, "30", "1:0:13", "2:0:23")
    assert code == 0, err
    assert err.count("killed by signal 9 (SIGKILL)") == 2
    begins = {generation: [w for w in says(out, "begin") if w[0] == generation] for generation in "123"}
    assert len({words[4] for words in begins["1"]}) == 1, "all began with rank 0's weights"
    assert sorted(words[1:3] for words in begins["2"]) == [["0", "2"], ["1", "2"]]
    assert [words[1:3] for words in begins["3"]] == [["0", "1"]]
    commits = dict(words[:2] for words in says(out, "commit"))
    for generation, batch in (("2", "10"), ("3", "20")):
        assert {words[3] for words in begins[generation]} == {batch}
        assert {words[4] for words in begins[generation]} == {commits[batch]}, "bitwise the commit"
    assert says(out, "end") == [["0", "1", "30", commits["30"]]]


@pytest.mark.full("slow")
def test_a_worker_that_stands_still_is_taken_out_and_the_other_goes_on(tmp_path: Path) -> None:
    stopped = {"VICTIMS_DIE_BY": str(int(signal.SIGSTOP))}
    code, out, err = train(tmp_path, "-np 2 --min-np 1", COUNTS, "30", "1:0:13", environment=stopped)
    assert code == 0, err
    assert "stopped by a signal (SIGSTOP or its like)" in err
    commits = dict(words[:2] for words in says(out, "commit"))
    (again,) = [words for words in says(out, "begin") if words[0] == "2"]
    assert again[1:5] == ["0", "1", "10", commits["10"]], "bitwise the commit"
    assert says(out, "end") == [["0", "1", "30", commits["30"]]]


@pytest.mark.full("slow")
def test_hosts_come_and_go(tmp_path: Path) -> None:
    """One host, then two, then only the second, which has the state by then."""
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:1\n")
    finder = tmp_path / "find"
    finder.write_text(f"#!/bin/sh\ncat {hosts}\n")
    finder.chmod(0o755)
    name = script(tmp_path, COUNTS)
    with (tmp_path / "err").open("w") as errors:
        process = subprocess.Popen(
            [*FARANDOLE, "run", "--quiet", "--min-np", "1", "--host-discovery-script", str(finder), "--",
             sys.executable, "-u", name, "1000"],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
    seen: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        seen.append(line)
        if "begin 1 0 1" in line:
            hosts.write_text("localhost:1\n127.0.0.1:1\n")
        if "begin 2 1 2" in line:
            hosts.write_text("127.0.0.1:1\n")
        if "begin 3 0 1" in line:
            deadline = time.monotonic() + 15
            while "has left" not in (tmp_path / "err").read_text() and time.monotonic() < deadline:
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            break
    out = "".join(seen) + process.communicate(timeout=20)[0]
    err = (tmp_path / "err").read_text()
    begins = {words[0]: words for words in says(out, "begin")}
    assert begins.keys() == {"1", "2", "3"}, err
    commits = dict(words[:2] for words in says(out, "commit"))
    for generation in ("2", "3"):
        batch, digest = begins[generation][3:]
        assert commits[batch] == digest, "they left at a commit, and nothing was lost"
    assert int(begins["3"][3]) > int(begins["2"][3]) >= 5
    log = next(tmp_path.glob("runs/*/logs/rank_0.log")).read_text()
    assert "RuntimeError: localhost[0] has been removed from elastic job" in log
    assert "worker 0 has left localhost" in err


# Both survivors wait for each other, and nobody for the worker that dies: only the launcher can free them.
CROSSED = """
import os, sys, time
import torch, torch.distributed as dist
import farandole as fd
from farandole.train.elastic import member
world = fd.init(progress=False)
if member().generation == 1:
    if world.rank == 2:
        time.sleep(0.5)
        os.kill(os.getpid(), 9)
    begin = time.monotonic()
    try:
        dist.recv(torch.zeros(10), src=1 - world.rank)
    except RuntimeError:
        print("freed", time.monotonic() - begin, flush=True)
    fd.shutdown()
    world = fd.init(progress=False)
total = torch.ones(10)
dist.all_reduce(total)
print("sum", int(total.sum()), flush=True)
fd.shutdown()
"""


@pytest.mark.full("further")
def test_survivors_that_wait_for_each_other_are_freed(tmp_path: Path) -> None:
    code, out, err = train(tmp_path, "-np 3 --min-np 2", CROSSED)
    assert code == 0, err
    freed = [float(words[0]) for words in says(out, "freed")]
    assert len(freed) == 2
    assert max(freed) < 5, "half a second until the death, some to import; not the time-out of ten minutes"
    assert [words[0] for words in says(out, "sum")] == ["20", "20"]
    assert os.environ.get("FARANDOLE_ELASTIC") is None


# Worker 1 dies while the others still compute their first loss: what they ask next is the store, not an exchange.
EARLY_DEATH = """
import os, signal, sys, time, torch
import farandole.horovod.torch as hvd

hvd.init()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0)
child = os.fork()
if child == 0:
    sys.exit(0)  # the end of a forked child does not hang up for its parent
os.waitpid(child, 0)

@hvd.elastic.run
def train(state):
    while state.batch < 5:
        if state.batch == 0:
            if os.environ["FARANDOLE_ELASTIC_WORKER"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.5)
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        state.batch += 1
        state.commit()

train(state)
print("end", hvd.rank(), hvd.size(), state.batch, flush=True)
"""


@pytest.mark.full("slow")
def test_a_worker_that_dies_before_the_others_first_backward_is_survived(tmp_path: Path) -> None:
    code, out, err = train(tmp_path, "-np 3 --min-np 1", EARLY_DEATH)
    assert code == 0, err
    assert sorted(says(out, "end")) == [["0", "2", "5"], ["1", "2", "5"]]
