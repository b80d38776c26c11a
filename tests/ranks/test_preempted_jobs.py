"""A job that is warned of its end: who is told, how long it may take to save, and what is said of the saves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.ranks.test_launch import FARANDOLE, gone_within, run, script

# A rank that listens needs 4 s to save, with a child that has no handler; what is not told of the signal goes on.
LISTENS = """
import os, pathlib, signal, subprocess, sys, time
seconds, rank = float(sys.argv[1]), os.environ["RANK"]
told = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, _: told.append(number))
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
pathlib.Path(f"pids.{rank}").write_text(f"{os.getpid()} {child.pid}")
while not told:
    time.sleep(0.02)
end = time.monotonic() + seconds
while time.monotonic() < end:
    time.sleep(0.02)
print("saved, told", *map(int, told), "and the child", "lives" if child.poll() is None else "is gone", flush=True)
child.kill()
"""


def start(directory: Path, *command: str, options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Start two ranks; return their launcher once both have written down their processes."""
    process = subprocess.Popen(
        [*FARANDOLE, "run", "-np", "2", *options, "--", *command],
        cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for(directory, process, "pids.*", 2)
    return process


def wait_for(directory: Path, process: subprocess.Popen[str], pattern: str, count: int) -> None:
    deadline = time.monotonic() + 30
    while len(list(directory.glob(pattern))) < count:
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(process.communicate(timeout=5))
        time.sleep(0.02)


def pids(directory: Path) -> list[int]:
    return [int(pid) for file in directory.glob("pids.*") for pid in file.read_text().split()]


@pytest.mark.full("slow")
def test_a_rank_that_listens_is_told_once_and_alone_and_may_take_its_time(tmp_path: Path) -> None:
    """The launcher is told several times: by a scheduler, by a script around it, by its terminal."""
    process = start(tmp_path, sys.executable, script(tmp_path, LISTENS), "4")
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
        process.send_signal(number)
        time.sleep(0.3)
    out, err = process.communicate(timeout=30)
    assert out.count("saved, told 15 and the child lives") == 2, (out, err)
    assert process.returncode == 143
    assert "SIGTERM: waiting for the ranks to end, at most 30 s; Ctrl-C ends them at once" in err
    assert gone_within(pids(tmp_path), 1.0)


def test_behind_a_shell_the_training_is_told_and_not_the_shell(tmp_path: Path) -> None:
    name = script(tmp_path, LISTENS)
    process = start(tmp_path, "bash", "-c", f"{sys.executable} {name} 0.5; echo then this")
    os.kill(process.pid, signal.SIGHUP)  # a terminal that is closed is no other reason to lose what was learned
    out, err = process.communicate(timeout=30)
    assert out.count("saved, told 15 and the child lives") == 2, (out, err)
    assert out.count("then this") == 2
    assert process.returncode == 129


def test_a_warning_by_sigusr1_goes_to_who_listens_and_ends_nothing(tmp_path: Path) -> None:
    text = f"import os\nif os.environ['RANK'] == '0':\n    exec({LISTENS!r})\nelse:\n    import pathlib, time\n"
    text += "    pathlib.Path('pids.1').write_text(str(os.getpid()))\n    time.sleep(1.5)\n    print('went on')\n"
    process = start(tmp_path, sys.executable, script(tmp_path, text), "0")
    process.send_signal(signal.SIGUSR1)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert "saved, told 10 and the child lives" in out
    assert "went on" in out


def test_the_time_to_save_ends_and_ctrl_c_ends_it_at_once(tmp_path: Path) -> None:
    for options, number in ((("--grace", "0.7"), None), ((), signal.SIGINT)):
        process = start(tmp_path, sys.executable, script(tmp_path, LISTENS), "600", options=options)
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        if number is not None:
            time.sleep(0.3)
            process.send_signal(number)
        process.communicate(timeout=20)
        assert process.returncode == 143
        assert time.monotonic() - begin < 4
        assert gone_within(pids(tmp_path), 1.0)
        for file in tmp_path.glob("pids.*"):
            file.unlink()


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "1e9"])
def test_a_time_to_save_that_is_none(tmp_path: Path, value: str) -> None:
    result = run(tmp_path, "run", f"--grace={value}", "-np", "2", "--", "true")
    assert result.returncode == 2
    assert f"argument --grace: '{value}': expected seconds, more than 0 and at most 86400" in result.stderr
    assert not list(tmp_path.iterdir())


TRAINS = """
import pathlib, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
import farandole as fd

class Samples(Dataset):
    def __len__(self):
        return 100_000
    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.full((4,), float(index % 7))

class Slow:
    def state_dict(self):
        time.sleep(float(sys.argv[2]))
        return {}
    def load_state_dict(self, state):
        pass

def main():
    rank = fd.init().rank
    model = nn.Linear(4, 4)
    model, optimizer = fd.distribute(model, torch.optim.Adam(model.parameters()))
    loader = DataLoader(Samples(), batch_size=4, num_workers=2, persistent_workers=True)
    if sys.argv[1] == "of fd.shard":
        loader = fd.shard(loader)
    else:
        fd.preempted()
    checkpointer = fd.Checkpointer("checkpoints", model, optimizer, extra=Slow())
    for step, batch in enumerate(loader, 1):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        if step == 3:
            pathlib.Path(f"ready.{rank}").touch()
        if checkpointer.after_step(step):
            print("saved at", step, flush=True)
            break
    checkpointer.close()

main()
"""


def begin_training(directory: Path, *words: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [*FARANDOLE, "run", "-np", "2", "--quiet", *words],
        cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for(directory, process, "ready.*", 2)
    return process


@pytest.mark.full("slow")
@pytest.mark.parametrize(
    ("whom", "loader"),
    [
        ("launcher", "of fd.shard"),
        ("all", "of fd.shard"),
        ("all", "of torch"),
        ("all ranks", "of fd.shard"),
    ],
)
def test_a_training_with_workers_is_saved_whoever_is_signalled(tmp_path: Path, whom: str, loader: str) -> None:
    """``all``: each process of the job, as ``scancel`` does it; ``all ranks``: and their workers alone."""
    process = begin_training(tmp_path, "--", sys.executable, script(tmp_path, TRAINS), loader, "0")
    below = psutil.Process(process.pid).children(recursive=True)
    if whom != "all ranks":
        process.send_signal(signal.SIGTERM)
    for each in below if whom != "launcher" else []:
        each.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=40)
    steps = {line.split()[-1] for line in out.splitlines() if "saved at" in line}
    assert len(steps) == 1, (out, err)
    step = steps.pop()
    assert process.returncode == (0 if whom == "all ranks" else 143), err
    assert (tmp_path / "checkpoints" / f"step-{int(step):08d}" / "manifest.json").exists()
    if whom != "all ranks":
        assert f"farandole: the last whole checkpoint is that of step {step} in {tmp_path}/checkpoints, " in err
    assert gone_within([each.pid for each in below], 2.0)


@pytest.mark.full("slow")
def test_a_save_that_takes_longer_than_there_is_time_is_said_not_to_be_there(tmp_path: Path) -> None:
    name = script(tmp_path, TRAINS)
    process = begin_training(tmp_path, "--grace", "1.5", "--", sys.executable, name, "of fd.shard", "60")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 143
    assert f"farandole: no checkpoint of this run is in {tmp_path}/checkpoints" in err
