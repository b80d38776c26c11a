"""Jobs that do no steps, with real processes: who waits for whom, when nothing is said, and how Ctrl-C ends.

The plan's `stall_seconds` is short here; that the default is ten seconds or 20 median steps is tested in
`tests/unit/train/test_stall.py`. Nothing here depends on how fast the machine is: a script that hangs does so
until it is stopped, and one that must not alarm pauses for longer than the three limits that a pause may take.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import warm
from tests.ranks.test_launch import FARANDOLE, gone_within, script

Job = warm.Started | subprocess.Popen[str]
SECONDS = 100.0
"""For a job to start and be noticed: on a busy machine alone the import of torch takes 20 s."""

HEAD = """
import os, sys, time, torch, farandole as fd
from torch.utils.data import DataLoader, TensorDataset

R = int(os.environ["RANK"])
world = fd.init()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = fd.distribute(model, optimizer)
open(f"pid.{R}", "w").write(str(os.getpid()))

def step():
    optimizer.zero_grad()
    loss = model(torch.full((2, 4), 1.0 + R)).sum()
    loss.backward()
    optimizer.step()
    return float(loss.detach())

def steps(count):
    for _ in range(count):
        step()
        time.sleep(0.02)
"""
SLOW_BACKWARD = """
class Stands(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None

def slow_step(seconds=5):
    optimizer.zero_grad()
    Stands.apply(model(torch.ones(2, 4)), seconds).sum().backward()
    optimizer.step()

"""
DDP = HEAD.replace(
    "model, optimizer = fd.distribute(model, optimizer)",
    "model = torch.nn.parallel.DistributedDataParallel(model)\nfd.record(model, optimizer)\n"
    "other = torch.distributed.new_group()",
)
EXTRA_MEAN = (
    HEAD
    + """
for i in range(10000):
    loss = step()
    if R == 0 and i == 9:
        fd.mean(loss)
"""
)
NO_BACKWARD = (
    HEAD
    + """
def evaluate():
    return fd.mean(1.0)

steps(10)
if R == 0:
    evaluate()
else:
    step()
"""
)
TRAINS = (
    HEAD
    + """
print("trains", flush=True)
steps(10**6)
"""
)


@contextmanager
def running(directory: Path, text: str, *words: str, stall: str = "1.5", size: int = 2) -> Iterator[Job]:
    """Start a job; its standard error goes to the file ``err``."""
    environment = {"FARANDOLE_FROZEN_SECONDS": "0", "OMP_NUM_THREADS": "1"}
    with (directory / "err").open("w") as err, (directory / "out").open("w") as out:
        process = warm.start(
            directory, *FARANDOLE[1:], "run", "-np", str(size), "--set", f"stall_seconds={stall}", *words, "--",
            sys.executable, script(directory, text), out=out, err=err, environment=environment,
        )  # fmt: skip
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
            process.wait(20)


def errors(directory: Path) -> str:
    return (directory / "err").read_text()


def wait_for(directory: Path, pattern: str, process: Job, name: str = "err") -> re.Match[str]:
    deadline = time.monotonic() + SECONDS
    while True:
        found = re.search(pattern, (directory / name).read_text())
        if found:
            return found
        assert process.poll() is None, errors(directory)
        assert time.monotonic() < deadline, errors(directory)
        time.sleep(0.05)


def run_of(directory: Path) -> Path:
    (found,) = (directory / "runs").iterdir()
    return found


def end(process: Job, number: int) -> int:
    process.send_signal(number)
    return process.wait(30)


def line_of(text: str, needle: str) -> int:
    return next(at for at, line in enumerate(text.splitlines(), 1) if needle in line)


@pytest.mark.full("slow")
@pytest.mark.timeout(2 * SECONDS)
def test_an_extra_mean_is_named_and_so_is_the_interruption(tmp_path: Path) -> None:
    mean, backward = line_of(EXTRA_MEAN, "fd.mean(loss)"), line_of(EXTRA_MEAN, "loss.backward()")
    with running(tmp_path, EXTRA_MEAN) as process:
        found = wait_for(tmp_path, r"no step for \d+ s: (.*)\n", process)
        where = f"rank 0 waits in fd.mean at script.py:{mean}, rank 1 in backward at script.py:{backward} (step);"
        assert found.group(1).startswith(where), found.group(1)
        assert "the same calls in the same order" in found.group(1)
        pids = [int((tmp_path / f"pid.{rank}").read_text()) for rank in (0, 1)]
        time.sleep(4.0)
        assert errors(tmp_path).count("no step for") == 1, "once a stall"
        assert errors(tmp_path).count("step 1 ") <= 1, "a line that says nothing new is not repeated"
        assert end(process, signal.SIGINT) == 130
    assert gone_within(pids, 1.0)
    err = errors(tmp_path)
    assert "Traceback" not in err, err
    assert "GLHF" not in err, err
    where = f"rank 0 waited in fd.mean at script.py:{mean}, rank 1 in backward at script.py:{backward} (step)\n"
    assert f"farandole: interrupted while hanging: {where}" in err
    assert "farandole: stopped all ranks on SIGINT; logs in " in err
    assert "training time" in err, "the closing summary"
    stacks = run_of(tmp_path) / "stacks"
    assert "in mean" in (stacks / "rank_0.txt").read_text()
    assert "in backward" in (stacks / "rank_1.txt").read_text()
    kept = json.loads((run_of(tmp_path) / "interrupted.json").read_text())
    assert kept["hanging"]
    assert [position["operation"] for position in kept["positions"]] == ["fd.mean", "backward"]


@pytest.mark.full("further")
@pytest.mark.timeout(2 * SECONDS)
def test_a_function_of_the_users_is_named_and_sigterm_ends_alike(tmp_path: Path) -> None:
    with running(tmp_path, NO_BACKWARD) as process:
        found = wait_for(tmp_path, r"no step for \d+ s: (.*)\n", process)
        assert re.match(
            r"rank 0 waits in fd\.mean at script\.py:\d+ \(evaluate\), rank 1 in backward", found.group(1)
        )
        assert end(process, signal.SIGTERM) == 143
    err = errors(tmp_path)
    assert "Traceback" not in err, err
    assert "farandole: interrupted while hanging: rank 0 waited in fd.mean" in err
    assert "farandole: stopped all ranks on SIGTERM; logs in " in err
    assert "exit code 143" in err


@pytest.mark.full("further")
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_end_while_training_is_two_lines_and_the_summary(tmp_path: Path, number: int, code: int) -> None:
    with running(tmp_path, TRAINS, "--quiet") as process:
        wait_for(tmp_path, "trains", process, "out")
        time.sleep(1.0)
        pids = [int((tmp_path / f"pid.{rank}").read_text()) for rank in (0, 1)]
        assert end(process, number) == code
    assert gone_within(pids, 1.0)
    lines = errors(tmp_path).splitlines()
    name = signal.Signals(number).name
    assert lines[-1].startswith(f"farandole: stopped all ranks on {name}; logs in "), lines
    assert lines[-1].endswith(f"; exit code {code}")
    assert all(line.startswith(f"farandole: {name}: waiting for the ranks to end") for line in lines[:-1]), lines
    assert not json.loads((run_of(tmp_path) / "interrupted.json").read_text())["hanging"]
    assert not (run_of(tmp_path) / "positions").exists()


PAUSES = {
    "an announced phase": HEAD + """
steps(10)
if R == 0:
    with fd.phase("evaluation"):
        time.sleep(5)
steps(10)
""",
    "long work without others": HEAD + """
steps(10)
until = time.monotonic() + 5
while time.monotonic() < until:
    sum(range(10000))
steps(10)
""",
    "validation that talks": HEAD + """
steps(10)
for _ in range(50):
    fd.mean(1.0)
    time.sleep(0.1)
steps(10)
""",
    "a backward that stands": HEAD + SLOW_BACKWARD + "steps(10)\nslow_step()\nsteps(10)",
    "the first backward stands": HEAD + SLOW_BACKWARD + "slow_step(10)\nsteps(10)",
    "a backward of DDP that stands": DDP + SLOW_BACKWARD + "steps(10)\nslow_step()\nsteps(10)",
    "sleep after training": HEAD + """
steps(10)
time.sleep(5)
""",
    "a first step that compiles": HEAD + """
time.sleep(3 * R)
until = time.monotonic() + 6
while R == 0 and time.monotonic() < until:
    sum(range(10000))
steps(10)
""",
    "a debugger": HEAD + """
import pdb

class Waits(pdb.Pdb):
    def cmdloop(self, intro=None):
        time.sleep(5)
        self.set_continue()

steps(10)
if R == 1:
    Waits(nosigint=True).set_trace()
steps(10)
""",
}  # fmt: skip


@pytest.mark.full("slow")
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("name", PAUSES)
def test_pauses_that_must_not_alarm(tmp_path: Path, name: str) -> None:
    with running(tmp_path, PAUSES[name], stall="1") as process:
        assert process.wait(SECONDS) == 0, errors(tmp_path)
    assert "no step" not in errors(tmp_path)
    assert not (run_of(tmp_path) / "stacks").exists(), "a job that ends well leaves no stacks"
    assert not (run_of(tmp_path) / "positions").exists()
    assert not (run_of(tmp_path) / "stall.json").exists()


@pytest.mark.full("slow")
@pytest.mark.timeout(2 * SECONDS)
def test_one_process_has_nothing_to_wait_for(tmp_path: Path) -> None:
    with running(tmp_path, HEAD + SLOW_BACKWARD + "slow_step(10)\nsteps(10)", stall="0.5", size=1) as process:
        assert process.wait(SECONDS) == 0, errors(tmp_path)
    assert "no step" not in errors(tmp_path)


@pytest.mark.full("slow")
@pytest.mark.timeout(2 * SECONDS)
def test_ddp_that_waits_in_backward_for_one_outside_of_it_is_a_hang(tmp_path: Path) -> None:
    """Its wait has no frame of Python: what it has begun tells that it is one."""
    text = DDP + "steps(10)\nif R == 0:\n    torch.distributed.barrier(other)\nelse:\n    step()"
    with running(tmp_path, text) as process:
        found = wait_for(tmp_path, "no step for .*", process)
    assert "rank 0 waits in torch.distributed.barrier" in found[0]
    assert "rank 1 in backward" in found[0]


@pytest.mark.full("slow")
@pytest.mark.timeout(2 * SECONDS)
def test_ranks_that_wait_for_one_at_work_are_a_note(tmp_path: Path) -> None:
    text = (
        HEAD
        + """
def validate():
    while not os.path.exists("enough"):
        sum(range(10000))

steps(10)
if R == 0:
    validate()
steps(10)
"""
    )
    with running(tmp_path, text, stall="1") as process:
        wait_for(tmp_path, "no step for .*\n", process)
        (tmp_path / "enough").touch()
        assert process.wait(SECONDS) == 0, errors(tmp_path)
    (said,) = re.findall(r"no step for .*", errors(tmp_path))
    assert "note: no step" in errors(tmp_path)
    assert re.search(r"rank 0 is at work at script\.py:\d+ \(validate\), rank 1 waits in backward", said), said
    assert 'with fd.phase("evaluation")' in said


@pytest.mark.full("slow")
@pytest.mark.timeout(2 * SECONDS)
def test_slow_data_is_a_note_that_names_the_dataset(tmp_path: Path) -> None:
    text = (
        HEAD
        + """
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index >= 48:
            time.sleep(4)
        return torch.ones(4)

for batch in fd.shard(DataLoader(Slow(), batch_size=2)):
    step()
"""
    )
    with running(tmp_path, text, stall="0.8") as process:
        found = wait_for(tmp_path, r"no step for .*", process)
        assert end(process, signal.SIGINT) == 130
    assert re.search(r"ranks 0 and 1 wait for data at script\.py:\d+ \(__getitem__\)", found.group()), (
        found.group()
    )
    assert "note: no step" in errors(tmp_path)


@pytest.mark.full("slow")
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_is_named_as_such(tmp_path: Path, stopped: int) -> None:
    with running(tmp_path, TRAINS) as process:
        wait_for(tmp_path, r"\[0\] trains", process, "out")
        time.sleep(1.0)
        frozen = int((tmp_path / f"pid.{stopped}").read_text())
        os.kill(frozen, signal.SIGSTOP)
        try:
            found = wait_for(tmp_path, r"no step for .*", process)
            assert f"rank {stopped} is stopped by a signal (SIGSTOP or its like)" in found.group()
            assert f"rank {1 - stopped} waits in" in found.group()
            assert "kill -CONT resumes" in found.group()
        finally:
            os.kill(frozen, signal.SIGCONT)
        wait_for(tmp_path, "the training goes on: a step was done", process)
        assert end(process, signal.SIGINT) == 130
    assert "interrupted while" not in errors(tmp_path)


HOROVOD = """
import os, time, torch
import farandole.horovod.torch as hvd

hvd.init()
R = hvd.rank()
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

def step():
    optimizer.zero_grad()
    loss = model(torch.full((2, 4), 1.0 + R)).sum()
    loss.backward()
    optimizer.step()
    return loss.detach()

for i in range(10000):
    loss = step()
    time.sleep(0.02)
    if i < 10 or R == 0:
        hvd.allreduce(loss, name="loss")
"""


@pytest.mark.full("further")
@pytest.mark.timeout(2 * SECONDS)
def test_a_horovod_rank_that_forgets_an_allreduce_is_named(tmp_path: Path) -> None:
    missing, backward = line_of(HOROVOD, "hvd.allreduce("), line_of(HOROVOD, "loss.backward()")
    with running(tmp_path, HOROVOD) as process:
        found = wait_for(tmp_path, r"no step for \d+ s: (.*)\n", process)
        where = f"rank 0 waits in hvd.allreduce at script.py:{missing}, rank 1 in backward at script.py:{backward}"
        assert found.group(1).startswith(where), found.group(1)
        assert "the same calls in the same order" in found.group(1)
        assert end(process, signal.SIGINT) == 130
    assert "interrupted while hanging: rank 0 waited in hvd.allreduce" in errors(tmp_path)


@pytest.mark.full("slow")
@pytest.mark.timeout(2 * SECONDS)
def test_it_can_be_turned_off(tmp_path: Path) -> None:
    with running(tmp_path, EXTRA_MEAN, stall="0") as process:
        wait_for(tmp_path, "", process)
        deadline = time.monotonic() + SECONDS
        while not all((tmp_path / f"pid.{rank}").exists() for rank in (0, 1)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(4.0)
        assert end(process, signal.SIGINT) == 130
    assert "no step" not in errors(tmp_path)
    assert "Traceback" not in errors(tmp_path)


@pytest.mark.full("slow")
@pytest.mark.timeout(2 * SECONDS)
def test_under_torchrun_rank_0_says_it(tmp_path: Path) -> None:
    text = EXTRA_MEAN.replace(
        "fd.distribute(model, optimizer)", "fd.distribute(model, optimizer, fd.Plan(stall_seconds=1.5))"
    )
    with (tmp_path / "err").open("w") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
             script(tmp_path, text)],
            cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=err, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        try:
            found = wait_for(tmp_path, r"farandole: no step for .*", process)
        finally:
            process.terminate()
            process.wait(60)
    assert re.search(
        r"rank 0 waits in fd\.mean at script\.py:\d+, rank 1 in backward at script\.py", found.group()
    )


FORGOTTEN = """
import torch, farandole as fd
from torch.utils.data import DataLoader, TensorDataset

for batch in fd.shard(DataLoader(TensorDataset(torch.ones(8, 1)))):
    pass
"""


@pytest.mark.full("further")
@pytest.mark.timeout(2 * SECONDS)
def test_a_forgotten_init_is_one_line_for_all_ranks(tmp_path: Path) -> None:
    with running(tmp_path, FORGOTTEN) as process:
        assert process.wait(SECONDS) == 2, "an error of input"
    err = errors(tmp_path)
    assert "Traceback" not in err, err
    assert re.search(
        r"farandole: rank \d on \S+ failed before its first step: script\.py:5: there is no world yet; "
        r"call farandole\.init\(\) first\n", err,
    ), err  # fmt: skip
    assert err.count("there is no world yet") == 1, err


@pytest.mark.full("further")
@pytest.mark.timeout(2 * SECONDS)
def test_bad_arguments_of_init_are_one_line(tmp_path: Path) -> None:
    text = "import farandole as fd\nfd.init(timeout_seconds=-1)\n"
    with running(tmp_path, text) as process:
        assert process.wait(SECONDS) == 2, "an error of input"
    err = errors(tmp_path)
    assert "Traceback" not in err, err
    assert err.count("timeout_seconds=-1: expected a positive number of seconds") == 1, err


@pytest.mark.timeout(2 * SECONDS)
def test_a_script_alone_gets_the_line_too(tmp_path: Path) -> None:
    done = warm.python(tmp_path, script(tmp_path, FORGOTTEN), timeout=SECONDS)
    assert done.returncode == 2
    assert done.stderr == "farandole: script.py:5: there is no world yet; call farandole.init() first\n"
