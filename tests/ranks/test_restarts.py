"""``farandole run --restarts``: a job that failed begins again, and ends as if nothing had been."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import warm
from tests.ranks.test_launch import FARANDOLE, gone_within, run, script

TRAINING = """
import os, sys
import torch
from torch import nn
import farandole as fd

directory, fault_at, fault = sys.argv[1], int(sys.argv[2]), sys.argv[3]
here = fd.init(timeout_seconds=20)
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8)) for _ in range(4)))
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
numbers = torch.Generator().manual_seed(1)
data = torch.utils.data.TensorDataset(*(torch.randn(96, 8, generator=numbers) for _ in range(2)))
model, optimizer = fd.distribute(model, optimizer)
loader = fd.shard(torch.utils.data.DataLoader(data, batch_size=8, shuffle=True))
checkpointer = fd.Checkpointer(directory, model, optimizer, every_steps=4, loader=loader)
done = checkpointer.load() or 0
while done < 20:
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = fd.step(model, nn.functional.mse_loss, inputs, targets)
        optimizer.step()
        done += 1
        if here.rank == 0:
            print("loss", done, repr(float(loss)), flush=True)
        if done == fault_at and here.rank == 1 and os.environ["FARANDOLE_GENERATION"] == "0":
            exec(fault)
        checkpointer.after_step(done)
        if done == 20:
            break
checkpointer.close()
fd.shutdown()
"""

PLANS = {
    "none": (), "zero": ("zero=3",), "int8": ("codec=int8",), "powersgd": ("codec=powersgd:2",),
    "pipeline": ("pipeline=2", "micro_batches=2"), "tensor": ("tensor=2",), "local": ("sync=local:H=3",),
    "server": ("sync=server:staleness=0",),
}  # fmt: skip


def train(directory: Path, *options: str, fault_at: int = 0, fault: str = "") -> subprocess.CompletedProcess[str]:
    """Train to the end with checkpoints of its own; rank 1 does what `fault` says after a step of generation 0."""
    options = ("-np", "2", "--quiet", "--run-dir", f"run{fault_at}", *options)
    words = (script(directory, TRAINING), f"saved{fault_at}", str(fault_at), fault)
    return warm.run(directory, "run", *options, "--", sys.executable, *words, timeout=60)


def losses_of(out: str) -> dict[int, str]:
    """Return the loss of each step, the last where it was done twice."""
    return {int(step): loss for step, loss in re.findall(r"loss (\d+) (\S+)", out)}


def model_at_the_end(directory: Path, saved: str) -> bytes:
    """Return the whole model of the last checkpoint: a pipeline is cut by times, so ranks may hold other parts."""
    result = warm.run(directory, "checkpoint", "export", saved, f"{saved}-weights")
    assert "step 20" in result.stdout + result.stderr, result
    return (directory / f"{saved}-weights" / "model.safetensors").read_bytes()


@pytest.mark.gate_cases("zero-kill")
@pytest.mark.parametrize("fault", ["kill", "raise"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_training_that_begins_again_ends_as_one_that_was_not_disturbed(
    tmp_path: Path, plan: str, fault: str
) -> None:
    settings = [word for text in PLANS[plan] for word in ("--set", text)]
    does = {"kill": "os.kill(os.getpid(), 9)", "raise": "raise ValueError('once')"}[fault]
    undisturbed = train(tmp_path, *settings)
    assert undisturbed.returncode == 0, undisturbed.stderr
    disturbed = train(tmp_path, "--restarts", "1", *settings, fault_at=11, fault=does)
    assert disturbed.returncode == 0, disturbed.stderr
    assert losses_of(disturbed.stdout) == losses_of(undisturbed.stdout)
    assert len(losses_of(disturbed.stdout)) == 20
    assert model_at_the_end(tmp_path, "saved11") == model_at_the_end(tmp_path, "saved0")
    first = f"{tmp_path}/run11/generations/0"
    whence = f"the last whole checkpoint is that of step 8 in {tmp_path}/saved11"
    assert f"restart 1 of 1, 2 ranks: {whence}; the files of before are in {first}\n" in disturbed.stderr
    (restart,) = json.loads((tmp_path / "run11" / "run.json").read_text())["restarts"]
    assert (restart["generation"], restart["rank"], restart["exit_code"]) == (0, 1, 137 if fault == "kill" else 1)
    names = {path.name for path in Path(first).iterdir()}
    assert {"run.json", "plan.toml", "failure.json", "logs", "crashes", "events-rank0.jsonl"} <= names
    assert "loss 11" in (Path(first) / "logs" / "rank_0.log").read_text()
    later = (tmp_path / "run11" / "logs" / "rank_0.log").read_text()
    assert "loss 9" in later
    assert "loss 8 " not in later, "its log is its own"
    assert not list((tmp_path / "run11").glob("farandole-server-*"))
    said = warm.run(tmp_path, "diagnose", "run11").stdout
    assert "started again once because rank 1 on" in said


@pytest.mark.full("slow")
@pytest.mark.parametrize("plan", ["none", "int8", "powersgd"])
def test_a_flipped_bit_is_in_no_checkpoint_and_in_no_result(tmp_path: Path, plan: str) -> None:
    settings = [word for text in PLANS[plan] for word in ("--set", text)]
    flip = "with torch.no_grad(): model[3][2].weight.view(torch.int32)[7, 63] ^= 1 << 20"
    undisturbed = train(tmp_path, *settings)
    disturbed = train(tmp_path, "--restarts", "1", *settings, fault_at=11, fault=flip)
    assert disturbed.returncode == 0, disturbed.stderr
    assert "after step 12 the ranks no longer train one model: parameters of ranks 0 and 1" in disturbed.stderr
    assert f"the last whole checkpoint is that of step 8 in {tmp_path}/saved11" in disturbed.stderr
    assert losses_of(disturbed.stdout) == losses_of(undisturbed.stdout)
    assert model_at_the_end(tmp_path, "saved11") == model_at_the_end(tmp_path, "saved0")


@pytest.mark.parametrize(
    ("text", "code", "generations", "says"),
    [
        (
            "raise ValueError('same')",
            1,
            2,
            "the same exception came at the same step as before the last restart",
        ),
        ("raise ValueError(generation)", 1, 3, "--restarts 2: there was no other left"),
        ("raise SystemExit(2)", 2, 1, "it would end with the same error"),
        ("rank == '1' and os.kill(os.getpid(), 9)", 137, 3, "--restarts 2: there was no other left"),
        ("generation == '0' and sys.exit(7)", 0, 2, ""),
        ("pass", 0, 1, ""),
    ],
)
def test_when_a_job_is_not_started_again(
    tmp_path: Path, text: str, code: int, generations: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = "import os, sys; rank, generation = os.environ['RANK'], os.environ['FARANDOLE_GENERATION']"
    told = "print('begun', generation, os.environ.get('TORCHELASTIC_RESTART_COUNT'), flush=True)"
    command = [sys.executable, "-S", "-c", f"{head}\n{told}\n{text}"]
    result = run(tmp_path, "run", "-np", "2", "--restarts", "2", "--quiet", "--run-dir", "r", "--", *command)
    assert result.returncode == code, result.stderr
    begun = {int(number) for number in re.findall(r"begun (\d)", result.stdout)}
    assert begun == set(range(generations))
    assert "begun 0 None" in result.stdout
    assert generations == 1 or "begun 1 1" in result.stdout
    assert (f"farandole: not started again: {says}\n" in result.stderr) == bool(says)
    assert result.stderr.count("fd.Checkpointer has saved none") == generations - 1
    assert (tmp_path / "r" / "failure.json").exists() == bool(code)


def test_fewer_ranks_where_a_signal_ends_the_same_one_each_time(tmp_path: Path) -> None:
    text = "import os; size = os.environ['WORLD_SIZE']; print(size, os.environ.get('CUDA_VISIBLE_DEVICES'))"
    text += "\nif size == '3' and os.environ['RANK'] == '1': os.kill(os.getpid(), 11)"
    options = ("-np", "3", "--min-np", "2", "--max-restarts", "5", "--quiet", "--run-dir", "r", "--no-bind")
    result = run(tmp_path, "run", *options, "--", sys.executable, "-S", "-c", text)
    assert result.returncode == 0, result.stderr
    assert "restart 1 of 5, 3 ranks" in result.stderr
    assert "restart 2 of 5 in 1 s, 2 ranks" in result.stderr
    assert sorted(line[4:] for line in result.stdout.splitlines())[:2] == ["2 0,2", "2 0,2"], result.stdout
    assert json.loads((tmp_path / "r" / "run.json").read_text())["size"] == 2


def test_a_signal_between_two_generations_ends_the_job(tmp_path: Path) -> None:
    text = "import os; open(f'{os.getpid()}.pid', 'w'); os.kill(os.getpid(), 9)"
    command = [*FARANDOLE, "run", "-np", "1", "--restarts", "9", "--quiet", "--run-dir", "r", "--"]
    launcher = subprocess.Popen(
        [*command, sys.executable, "-S", "-c", text], cwd=tmp_path, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert launcher.stderr is not None
    said = ""
    while "restart 3 of 9 in 2 s" not in said:
        said = launcher.stderr.readline()
        assert said, "it has ended"
    begin = time.monotonic()
    launcher.send_signal(signal.SIGTERM)
    _, rest = launcher.communicate(timeout=20)
    assert time.monotonic() - begin < 1.5
    assert launcher.returncode == 143
    assert "stopped all ranks on SIGTERM" in rest
    assert gone_within([int(path.stem) for path in tmp_path.glob("*.pid")], 1.0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--restarts", "-1"], "'-1': expected a whole number, 0 or more"),
        (["--restarts", "1", "--min-np", "3"], "--min-np 3: expected 1 to 2, the number of ranks"),
        (["--restarts", "1", "--max-np", "3"], "--max-np is for elastic jobs; leave it out, or --restarts"),
        (
            ["--restarts", "1", "--on", "slurm"],
            "--restarts with --on slurm: ranks are started again here",
        ),
    ],
)
def test_restarts_that_cannot_be_are_refused(tmp_path: Path, options: list[str], says: str) -> None:
    result = run(tmp_path, "run", "-np", "2", *options, "--", sys.executable, "-c", "pass")
    assert result.returncode == 2
    assert says in result.stderr
    assert not (tmp_path / "runs").exists()


def test_a_node_of_several_cannot_begin_again_alone(tmp_path: Path) -> None:
    node = {"PET_NODE_RANK": "0", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": "29401"}  # fmt: skip
    words = [*FARANDOLE, "run", "--restarts", "1", "--", sys.executable, "-c", "pass"]
    result = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, **node}, check=False
    )
    assert result.returncode == 2
    assert "one launcher has to start all of them" in result.stderr
