"""The commands on a script that trains: run, verify, report; alone, under farandole, under torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.test_launch import script
from tests.warm import python, run

TRAINS = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import farandole as fd

world = fd.init()
torch.manual_seed(0)
x = torch.randn(64, 5)
rows = TensorDataset(x, x.sum(1, keepdim=True))
model = nn.Linear(5, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.05)
model, optimizer = fd.distribute(model, optimizer)
loader = fd.shard(DataLoader(rows, batch_size=8, shuffle=True))
for epoch in range(3):
    for a, b in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(a), b)
        loss.backward()
        fd.log(loss=loss, total_steps=3 * len(loader))
        optimizer.step()
        FAULT
print("weight", [round(w, 4) for w in model.weight[0].tolist()])
"""


def trains(directory: Path, fault: str = "pass", name: str = "train.py") -> str:
    return script(directory, TRAINS.replace("FAULT", fault), name)


def test_run_records_summarises_and_compares_with_one_process(tmp_path: Path) -> None:
    name = trains(tmp_path)
    first = run(tmp_path, "run", "-np", "1", "--", sys.executable, name)
    assert first.returncode == 0, first.stderr
    assert "training time" in first.stderr
    result = run(tmp_path, "run", "-np", "2", "--json", "--run-dir", "runs/two", "--", sys.executable, name)
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    summary = answer["summary"]
    assert (summary["size"], summary["steps"], summary["samples"]) == (2, 12, 192)
    assert summary["comparison"]["speedup"] > 0
    assert summary["sent_bytes_per_step"] == 124, "a bias on a cache line of 16, 5 weights, 2 flags, 8 marks"
    assert 0.99 < sum(summary["shares"].values()) < 1.01
    assert summary["last_loss"] < summary["first_loss"]
    rows = [json.loads(line) for line in (tmp_path / "runs/two/metrics.jsonl").read_text().splitlines()]
    assert [row["kind"] for row in rows][-1] == "summary"
    assert rows[0]["total_steps"] == 12
    assert "weight" in (tmp_path / "runs/two/logs/rank_1.log").read_text()
    report = run(tmp_path, "report", "runs/two")
    assert report.returncode == 0
    page = (tmp_path / report.stdout.strip()).read_text()
    for section in ("step", "late", "timeline", "curves", "network", "balance", "scaling", "environment"):
        assert f'<section id="{section}">' in page


@pytest.mark.full("slow")
def test_the_script_alone_under_farandole_and_under_torchrun_is_the_same(tmp_path: Path) -> None:
    name = trains(tmp_path)
    alone = python(tmp_path, name)
    assert alone.stdout.count("weight") == 1
    mine = run(tmp_path, "run", "-np", "2", "--", sys.executable, name)
    theirs = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", name],
        cwd=tmp_path, capture_output=True, text=True, check=True, timeout=50,
    )  # fmt: skip
    weights = {line.split("weight ")[1] for line in mine.stdout.splitlines()}
    assert len(weights) == 1
    # torchrun's ranks write into each other's lines.
    assert theirs.stdout.count(weights.pop()) == 2


def verify(directory: Path, name: str, *options: str) -> tuple[int, dict[str, Any], str]:
    command = ["-np", "2", "--steps", "3", "--json", *options, "--", sys.executable, name]
    result = run(directory, "verify", *command)
    return result.returncode, json.loads(result.stdout) if result.stdout else {}, result.stderr


def test_verify_passes_a_healthy_script_and_stops_it_early(tmp_path: Path) -> None:
    code, answer, err = verify(tmp_path, trains(tmp_path))
    assert code == 0, err
    assert {c["name"] for c in answer["checks"] if c["passed"]} == {
        "ranks", "parameters", "buffers", "optimizer state", "gradients", "batches", "loss",
    }  # fmt: skip
    assert "weight" not in err, "it was stopped after three steps"
    page = run(tmp_path, "verify", "-np", "2", "--", sys.executable, str(tmp_path / "train.py"))
    assert page.returncode == 0
    assert page.stdout.splitlines()[-1] == "All in order."
    assert "         ok  parameters: the same bits on all ranks" in page.stdout


@pytest.mark.full("further")
def test_verify_names_what_is_wrong(tmp_path: Path) -> None:
    name = trains(tmp_path, "model.weight.data[0, 2] += world.rank * 1e-6")
    text = (
        Path(name)
        .read_text()
        .replace("fd.shard(DataLoader(rows, batch_size=8, shuffle=True))", "DataLoader(rows)")
    )
    Path(name).write_text(text)
    code, answer, _ = verify(tmp_path, name)
    assert code == 1
    failed = {c["name"]: c["answer"] for c in answer["checks"] if c["passed"] is False}
    assert failed["parameters"] == "'weight' differs on ranks 0 and 1 (no majority)"
    assert failed["batches"] == "ranks 0 and 1 saw the same samples in step 1"
    page = run(tmp_path, "verify", "-np", "2", "--", sys.executable, name)
    assert page.returncode == 1
    assert "-> use loader = fd.shard(loader)" in page.stdout


EVALUATES = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 1)

    def forward(self, *, rows):
        return self.linear(rows)

model = Model()
model(rows=torch.ones(2, 5))
fd.distribute(model, optimizer := torch.optim.SGD(model.parameters(), 0.05))
model(rows=torch.ones(2, 5))
for (a, b), _ in zip(LOADER, range(2)):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(rows=a), b).backward()
    optimizer.step()
for a, b in DataLoader(rows, batch_size=8):
    nn.functional.mse_loss(model(rows=a), b)
"""


@pytest.mark.full("slow")
def test_verify_compares_the_samples_of_steps_alone(tmp_path: Path) -> None:
    """Not those of an undivided evaluation with gradients, nor of a first pass that has no backward."""
    begin = TRAINS[: TRAINS.index("model = ")]
    text = begin + EVALUATES.replace("LOADER", "fd.shard(DataLoader(rows, batch_size=8))")
    code, answer, err = verify(tmp_path, script(tmp_path, text))
    assert code == 0, (answer, err)
    answers = {c["name"]: (c["passed"], c["answer"]) for c in answer["checks"]}
    assert answers["batches"] == (True, "different on every rank in 2 steps")
    text = begin + EVALUATES.replace("LOADER", "DataLoader(rows, batch_size=8)")
    code, answer, _ = verify(tmp_path, script(tmp_path, text))
    assert code == 1
    failed = {c["name"]: c["answer"] for c in answer["checks"] if c["passed"] is False}
    assert failed == {"batches": "ranks 0 and 1 saw the same samples in step 1"}


SHUFFLED_STREAM = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        for i in range(0, 64, 16):
            yield from (rows[i + int(j)] for j in torch.randperm(16))

fd.seed(0, per_rank=True)
rows, stream = TensorDataset(x, x.sum(1, keepdim=True)), Stream()
"""


def test_verify_counts_the_samples_that_two_ranks_train_on(tmp_path: Path) -> None:
    """Every rank reads the whole stream, in an order of its own."""
    text = TRAINS.replace("rows = TensorDataset(x, x.sum(1, keepdim=True))\n", SHUFFLED_STREAM)
    text = text.replace("DataLoader(rows, batch_size=8, shuffle=True)", "DataLoader(stream, batch_size=8)")
    code, answer, err = verify(
        tmp_path, script(tmp_path, text.replace("3 * len(loader)", "12").replace("FAULT", ""))
    )
    assert code == 0, err
    said = {c["name"]: c["answer"] for c in answer["checks"]}
    assert said["samples"].endswith(" of 48 were trained on by another rank, too, in the same step")


@pytest.mark.full("further")
def test_verify_stops_a_script_that_distributes_no_model(tmp_path: Path) -> None:
    name = trains(tmp_path)
    lines = [line for line in Path(name).read_text().splitlines() if "fd.distribute" not in line]
    Path(name).write_text("\n".join(lines))
    code, answer, err = verify(tmp_path, name)
    assert code == 1
    assert "no model was distributed" in {check["answer"] for check in answer["checks"]}
    assert "weight" not in err, "it was stopped after three steps"


HOROVOD = """
import torch
from torch import nn
import farandole.horovod.torch as hvd

hvd.init()
torch.manual_seed(SEED)
model = nn.Linear(5, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.OPERATION)
torch.manual_seed(hvd.rank())
for step in range(20):
    x = torch.randn(8, 5)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    optimizer.step()
print("it went on to its end")
"""


def test_verify_compares_what_an_optimizer_of_horovod_trains(tmp_path: Path) -> None:
    right = script(tmp_path, HOROVOD.replace("SEED", "0").replace("OPERATION", "Average"), "right.py")
    code, answer, err = verify(tmp_path, right)
    assert code == 0, err
    assert {c["name"]: c["passed"] for c in answer["checks"]} == dict.fromkeys(
        ("ranks", "parameters", "gradients", "optimizer state", "batches", "loss"), True
    )
    assert "it went on" not in err
    wrong = script(tmp_path, HOROVOD.replace("SEED", "hvd.rank()").replace("OPERATION", "Average"), "wrong.py")
    code, answer, _ = verify(tmp_path, wrong)
    assert code == 1
    (failed,) = [c for c in answer["checks"] if c["passed"] is False]
    assert failed["answer"].startswith("'weight' (and 1 more) differs on ranks 0 and 1")
    assert "hvd.broadcast_parameters" in failed["remedy"]


@pytest.mark.full("further")
def test_verify_fails_no_training_by_adasum_which_it_cannot_compare(tmp_path: Path) -> None:
    name = script(tmp_path, HOROVOD.replace("SEED", "0").replace("OPERATION", "Adasum"))
    code, answer, err = verify(tmp_path, name)
    assert code == 0, err
    (model,) = [c for c in answer["checks"] if c["name"] == "model"]
    assert model["passed"] is None
    assert "no hvd.DistributedOptimizer was seen but Adasum's" in model["answer"]


@pytest.mark.full("slow")
def test_verify_deep_sees_what_all_ranks_have_wrong_alike(tmp_path: Path) -> None:
    name = trains(tmp_path)
    text = Path(name).read_text()
    spoilt = (
        "from farandole.parallel.model import DistributedModel\n"
        "DistributedModel.of(model).reducer.passes.divisor = 1.0\nloader ="
    )
    Path(name).write_text(text.replace("loader =", spoilt, 1))
    assert verify(tmp_path, name)[0] == 0, "the ranks hold the same bits, and saw different samples"
    code, answer, _ = verify(tmp_path, name, "--deep")
    assert code == 1
    failed = {c["name"]: c["answer"] for c in answer["checks"] if c["passed"] is False}
    assert "it is 2 times that (added up, and not divided)" in failed["gradients of one process"]


@pytest.mark.full("further")
def test_verify_of_a_script_that_never_uses_farandole(tmp_path: Path) -> None:
    result = run(tmp_path, "verify", "-np", "2", "--", sys.executable, script(tmp_path, "print(1)"))
    assert result.returncode == 1
    assert "farandole: the script ended without fd.init" in result.stderr


def test_a_plan_that_the_ranks_refuse_ends_with_2(tmp_path: Path) -> None:
    name = trains(tmp_path)
    for key, message in (
        ("tensor=3", "plan: tensor 3 needs a multiple of 3 ranks, but there are 2"),
        ("tensor=2", "but no layer of this Linear is recognised"),
    ):
        result = run(tmp_path, "run", "-np", "2", "--set", key, "--", sys.executable, name)
        assert message in result.stderr
        assert result.returncode == 2, result.stderr


@pytest.mark.full("further")
@pytest.mark.parametrize("starter", ["alone", "torchrun"])
def test_a_plan_that_is_refused_ends_with_2_without_our_launcher(tmp_path: Path, starter: str) -> None:
    name = trains(tmp_path)
    path = Path(name)
    path.write_text(path.read_text().replace("(model, optimizer)", "(model, optimizer, fd.Plan(tensor=3))"))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [sys.executable, *(torchrun if starter == "torchrun" else []), name]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "plan: tensor 3 needs a multiple of 3 ranks" in done.stderr, "also through torch's hook"
    if starter == "torchrun":
        assert "exitcode  : 2" in done.stderr
    else:
        assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr


@pytest.mark.full("further")
def test_an_exception_names_rank_host_and_step_and_ours_is_one_line(tmp_path: Path) -> None:
    name = trains(tmp_path, "assert not (world.rank == 1 and world.session.steps.done == 4), 'on purpose'")
    result = run(tmp_path, "run", "-np", "2", "--", sys.executable, name)
    assert result.returncode == 1
    first = next(line for line in result.stderr.splitlines() if line.startswith("farandole: "))
    assert first.startswith("farandole: rank 1 on ")
    assert first.endswith("failed after step 4: AssertionError: on purpose")
    text = Path(name).read_text().replace("nn.Linear(5, 1)", "nn.Linear(5, 1 + world.rank)")
    Path(name).write_text(text)
    result = run(tmp_path, "run", "-np", "2", "--", sys.executable, name)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert 'parameter \'weight\' is [[1, 5], "float32"] on rank 0, [[2, 5], "float32"] on rank 1' in result.stderr
    for rank in (0, 1):
        log = max((tmp_path / "runs").glob(f"*/logs/rank_{rank}.log"), key=lambda path: path.stat().st_mtime)
        assert f"rank {rank}, comparing parameters" in log.read_text(), "every rank says it"


@pytest.mark.full("further")
def test_a_plan_reaches_the_script_and_is_stored(tmp_path: Path) -> None:
    text = TRAINS.replace("FAULT", "pass").replace(
        'print("weight"',
        "from farandole.parallel.model import DistributedModel\n"
        "print(DistributedModel.of(model).plan.accumulate)\nprint('x'",
    )
    name = script(tmp_path, text)
    result = run(
        tmp_path, "run", "-np", "2", "--set", "accumulate=2", "--run-dir", "r", "--", sys.executable, name
    )
    assert result.returncode == 0, result.stderr
    assert "[1] 2" in result.stdout.splitlines()
    assert "accumulate = 2" in (tmp_path / "r" / "plan.toml").read_text()
    assert json.loads((tmp_path / "r" / "run.json").read_text())["plan"]["accumulate"] == 2


@pytest.mark.full("slow")
def test_what_was_recorded_before_a_kill_can_be_read(tmp_path: Path) -> None:
    name = trains(
        tmp_path, "import time, os; time.sleep(0.3); world.session.steps.done == 8 and os.kill(os.getpid(), 9)"
    )
    result = run(tmp_path, "run", "-np", "2", "--run-dir", "r", "--", sys.executable, name)
    assert result.returncode == 137
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert summary["steps"] >= 3, "flushed at least once a second"
    assert run(tmp_path, "report", "r").returncode == 0
