"""Jobs whose ranks train on their own: other numbers of ranks after a checkpoint, ranks that die, `verify`."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from tests.ranks.pool import patient
from tests.warm import run

RESUME = """
import sys, torch, farandole as fd
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
what, folder = sys.argv[1:3]
here = fd.init()
torch.manual_seed(4)
model = nn.Sequential(nn.Linear(6, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 3))
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
plan = {"every": fd.Plan(), "measured": fd.Plan(sync="auto", codec="auto", lossy=True)}.get(
    sys.argv[3], fd.Plan(sync="diloco:H=3", codec="int4"))
fd.distribute(model, optimizer, plan)
x = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
loader = fd.shard(DataLoader(TensorDataset(x, x[:, :3].sin()), batch_size=6), split=True)
def passes(most):
    for _, (xs, ys) in zip(range(most), loader):
        nn.functional.mse_loss(model(xs), ys).backward()
        optimizer.step()
        optimizer.zero_grad()
if what == "save":
    passes(1 if sys.argv[3] == "measured" else 7)  # on one host it is chosen after the second step
    fd.save(folder, model, optimizer, step=7)
else:
    assert fd.load(folder, model, optimizer) == 7
digest = sum(float(each.double().sum()) for each in model.parameters())
from farandole.comm.world.store_sync import all_gather_json
digests = all_gather_json(here, "digest", digest)
assert len(set(digests)) == 1, digests
if here.rank == 0:
    print("has", repr(digest))
passes(4)
fd.drain(model)
assert len(set(all_gather_json(here, "digest", float(model[2].weight.sum())))) == 1
fd.shutdown()
"""

DEADLY = """
import os, signal, sys, time, torch, farandole as fd
from pathlib import Path
from torch import nn
sync, at = sys.argv[1], int(sys.argv[2])
here = fd.init()
model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
fd.distribute(model, optimizer, fd.Plan(sync=sync))
for step in range(1, 100):
    model(torch.ones(8, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == at and here.rank == 1:
        Path("killed").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    if step == at:
        time.sleep(0.2)  # so that the others are in a step or a meeting of their own when it is noticed
"""

MEETS = """
import sys, torch, farandole as fd
fd.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
fd.distribute(model, optimizer)
for step in range(int(sys.argv[1])):
    torch.nn.functional.mse_loss(model(torch.randn(8, 4)), torch.full((8, 1), float(fd.world().rank))).backward()
    optimizer.step()
    optimizer.zero_grad()
fd.drain(model)
fd.shutdown()
"""

VERIFIED = """
import torch, farandole as fd
from torch import nn
fd.init()
model = nn.Linear(4, 4)
fd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), fd.Plan(sync="local:H=2"))
"""


@pytest.mark.full("busy")
@patient
def test_the_end_says_how_many_meetings_there_were_and_what_that_is_not(tmp_path: Path) -> None:
    (tmp_path / "meets.py").write_text(MEETS)
    command = ("--set", "sync=diloco:H=30,fragments=2", "--", sys.executable, "meets.py", "65")
    done = run(tmp_path, "run", "-np", "2", *command, timeout=60)
    assert done.returncode == 0, done.stderr
    said = " ".join((done.stdout + done.stderr).split())
    found = re.search(
        r"sync diloco:fragments=2: 3 meetings, where ranks were ([\d.]+)% apart from their mean", said
    )
    assert found, said
    assert float(found[1]) > 0
    assert "this is not the training of one process (docs/fast/rarely-meeting.md)" in said
    assert "warning: 3 meetings are few" in said


@pytest.mark.full("slow")
@patient
@pytest.mark.parametrize(
    "jobs",
    [
        ((2, "save", ""), (3, "load", ""), (1, "load", ""), (2, "load", "every"), (2, "load", "")),
        ((2, "save", "measured"), (3, "load", "measured"), (1, "load", "measured"), (3, "load", "")),
    ],
    ids=["rarely", "not chosen yet"],
)
def test_other_numbers_of_ranks_and_other_plans_go_on_from_a_checkpoint(
    jobs: tuple[tuple[int, str, str], ...], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(RESUME)
    said = []
    for size, what, plan in jobs:
        command = ("--", sys.executable, str(script), what, str(tmp_path / "saved"), plan)
        done = run(tmp_path, "run", "-np", str(size), *command)
        assert done.returncode == 0, done.stderr
        said.append(re.findall(r"has (\S+)", done.stdout))
    assert said[0]
    assert all(each == said[0] for each in said), said


@pytest.mark.full("slow")
@pytest.mark.alone
@patient
@pytest.mark.parametrize(
    ("sync", "at"), [("local:H=50", 5), ("local:H=5", 5), ("local:H=6,fragments=2,overlap=2", 3)]
)
def test_a_rank_that_is_killed_ends_all_within_five_seconds(sync: str, at: int, tmp_path: Path) -> None:
    """Between two meetings, after one, and while a part of the model is on its way."""
    script = tmp_path / "train.py"
    script.write_text(DEADLY)
    done = run(tmp_path, "run", "-np", "3", "--", sys.executable, str(script), sync, str(at))
    seconds = time.time() - float((tmp_path / "killed").read_text())
    assert seconds < 5.0, f"{seconds:.2f} s after the kill: {done.stderr}"
    assert done.returncode == 137, done.stderr
    assert re.search(r"rank 1 on \S+ failed.*killed by signal 9 \(SIGKILL\)", done.stderr), done.stderr


@patient
def test_verify_says_that_there_is_nothing_to_compare(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(VERIFIED)
    done = run(tmp_path, "verify", "-np", "2", "--", sys.executable, str(script))
    assert done.returncode != 0
    assert "leave sync out for the check" in done.stderr, done.stderr
