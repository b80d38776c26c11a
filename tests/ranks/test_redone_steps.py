"""Ranks that are lost in a plain loop under ``farandole run --min-np``: their step is made again by the others."""

from __future__ import annotations

import collections
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import warm
from tests.ranks.test_launch import script

MODEL = """
def make_model(kind):
    torch.manual_seed(0)
    if kind == "wide":  # float32 matrices that codecs take
        first = nn.Sequential(nn.Linear(8, 128), nn.BatchNorm1d(128), nn.Tanh())
        return nn.Sequential(first, nn.Linear(128, 128), nn.Linear(128, 8))
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)).double()
"""
TRAINING = (
    """
import json, os, sys, time
import torch
from torch import nn
import farandole as fd
from farandole.comm.engine.in_flight import InFlightBuckets
from farandole.comm.engine.redo import StepRedo
from farandole.comm.engine.reducer import GradientReducer
from farandole.core.vocabulary.errors import PeerLost

kind, plant, at, workers, each_step = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
here = fd.init(timeout_seconds=20)
me, calls, vote = here.rank, [0], StepRedo._vote
def planted(redo):
    calls[0] += 1
    if calls[0] == at and plant == "nobody":
        raise PeerLost("planted", rank=me, operation="the vote")
    vote(redo)
    if calls[0] == at and plant == "behind" and me:
        time.sleep(0.3)  # the other one has the vote of all by then
    if calls[0] == at and plant == "behind" and me == 1:
        os.kill(os.getpid(), 9)
    if calls[0] == at and plant == "behind" and me == 2:
        raise PeerLost("planted", rank=2, operation="the vote")
StepRedo._vote = planted
asks = [0]
def forgetful(self, question):
    answer = ask(self, question)
    asks[0] += 1
    if asks[0] == at:
        if me:
            time.sleep(0.3)  # the other one is in the next exchange by then
        if me == 1:
            os.kill(os.getpid(), 9)
        if me == 2:
            self._done -= 1
            def lost():
                raise PeerLost("planted", rank=2, operation="a question")
            return ask(self, lost)
    return answer
ask = StepRedo.ask
if plant == "unheard answer":
    StepRedo.ask = forgetful
def breaks_off(in_flight):
    if me == 2 or calls[0]:
        return prepare(in_flight)
    calls[0] = 1
    for extra in in_flight._extra:
        extra.prepare()
    raise PeerLost("planted", rank=me, operation="what travels along")  # of which rank 2 knows the end
prepare = InFlightBuckets.prepare_extra_tensors
if plant == "in the first exchange":
    InFlightBuckets.prepare_extra_tensors = breaks_off
def dies(*_):
    os.kill(os.getpid(), 9)
if me == 3 and plant == "when the others meet":
    StepRedo._say = dies
if me == 3 and plant == "when the others connect":
    GradientReducer.reconnect = dies
"""
    + MODEL
    + """
model = make_model(kind)
kinds = torch.float64 if kind == "exact" else torch.float32
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
fd.distribute(model, optimizer)
numbers = torch.Generator().manual_seed(1)
xs, ys = (torch.randn(101, 8, generator=numbers, dtype=kinds) for _ in range(2))
data = torch.utils.data.TensorDataset(xs, ys, torch.arange(101))
plain = torch.utils.data.DataLoader(data, 4, shuffle=True, num_workers=workers, drop_last=kind == "wide")
loader = fd.shard(plain)
if "save" in each_step:
    saver = fd.Checkpointer("saved", model, optimizer, loader=loader, every_steps=4)
log, places, step = open(f"log{me}.jsonl", "w"), [], 0
for epoch in range(2):
    for x, y, ids in loader:
        if me in (1, 3) and step == at + me and plant.startswith(("kill", "when")):
            os.kill(os.getpid(), 9)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        places.append(loader.state_dict())
        print(json.dumps([epoch, step, ids.tolist(), here.session.batch_weight.factor]), file=log, flush=True)
        step += 1
        if "mean" in each_step:
            fd.mean(loss)
        if "save" in each_step:
            saver.after_step(step)
torch.save(model.state_dict(), f"end{me}.pt")
json.dump(places, open(f"places{me}.json", "w"))
"""
)


def train(
    directory: Path, *words: str, ranks: int = 3, keys: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Train under ``--min-np 1``; `words`: kind of model, what is planted, where, workers, what each step asks."""
    directory.mkdir(exist_ok=True)
    return run(directory, TRAINING, words, ranks=ranks, keys=keys)


def run(
    directory: Path, text: str, words: tuple[str, ...], *options: str, ranks: int, keys: tuple[str, ...]
) -> subprocess.CompletedProcess[str]:
    """Run a script with `words` on ranks that may be lost."""
    settings = [word for key in ("on_failure=continue", *keys) for word in ("--set", key)]
    job = ("-np", str(ranks), "--min-np", "1", "--quiet", "--run-dir", "run", *settings, *options)
    return warm.run(directory, "run", *job, "--", sys.executable, script(directory, text), *words, timeout=60)


def end_of(directory: Path, rank: int) -> dict[str, Any]:
    """Return the state of the model of a rank at its end."""
    found: dict[str, Any] = torch.load(directory / f"end{rank}.pt", weights_only=True)
    return found


def replay(directory: Path, lost: dict[int, tuple[int, int, list[int]]]) -> tuple[nn.Module, dict[int, list[int]]]:
    """Train in one process on what the ranks' logs say; return the model and the samples of each epoch.

    `lost`: batches that were in a step though their rank wrote no line of it.
    """
    rows: dict[tuple[int, int], list[int]] = collections.defaultdict(list)
    for path in sorted(directory.glob("log*.jsonl")):
        for line in path.read_text().splitlines():
            epoch, step, ids, factor = json.loads(line)
            rows[epoch, step] += ids if factor else []
    for epoch, step, ids in lost.values():
        rows[epoch, step] += ids
    names: dict[str, Any] = {"torch": torch, "nn": nn}
    exec(MODEL, names)
    model = names["make_model"]("exact")
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    numbers = torch.Generator().manual_seed(1)
    xs, ys = (torch.randn(101, 8, generator=numbers, dtype=torch.float64) for _ in range(2))
    seen: dict[int, list[int]] = collections.defaultdict(list)
    for (epoch, _), ids in sorted(rows.items()):
        seen[epoch] += ids
        optimizer.zero_grad()
        nn.functional.mse_loss(model(xs[ids]), ys[ids]).backward()
        optimizer.step()
    return model, seen


def assert_is_that_of_one_process(
    directory: Path, left: list[int], model: nn.Module, seen: dict[int, list[int]]
) -> None:
    assert [sorted(each) for each in seen.values()] == [list(range(101))] * 2, "each sample once an epoch"
    for rank in left:
        for name, value in model.state_dict().items():
            torch.testing.assert_close(end_of(directory, rank)[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.gate_cases("4-0-alone")
@pytest.mark.parametrize(
    ("ranks", "workers", "each_step", "keys"),
    [
        pytest.param(4, 0, "alone", (), id="4-0-alone"),
        pytest.param(2, 0, "mean", (), id="2-0-mean"),
        pytest.param(4, 2, "mean,save", (), id="4-2-mean,save"),
        pytest.param(4, 0, "save", ("route=flat",), id="4-0-save-flat"),
        pytest.param(4, 0, "save", ("codec=int8",), id="4-0-save-int8"),  # which float64 does not have
    ],
)
def test_steps_of_lost_ranks_are_those_of_one_process_that_saw_the_same_batches(
    tmp_path: Path, ranks: int, workers: int, each_step: str, keys: tuple[str, ...]
) -> None:
    ended = train(tmp_path, "exact", "kill", "2", str(workers), each_step, ranks=ranks, keys=keys)
    assert ended.returncode == 0, ended.stderr
    assert f"lost rank 1 of {ranks}: {ranks - 1} go on in step 4\n" in ended.stderr
    left = [rank for rank in range(ranks) if rank not in (1, 3)]
    assert sorted(tmp_path.glob("end*.pt")) == [tmp_path / f"end{rank}.pt" for rank in left]
    assert_is_that_of_one_process(tmp_path, left, *replay(tmp_path, {}))
    if "save" in each_step:
        manifests = [json.loads(path.read_bytes()) for path in (tmp_path / "saved").glob("step-*/manifest.json")]
        assert manifests
        assert all(each["world_size"] >= len(left) == 2 for each in manifests), "none of a part of the ranks"
        listed = warm.run(tmp_path, "checkpoint", "list", "saved").stdout
        last = max(json.loads(line)[1] for line in (tmp_path / "log0.jsonl").read_text().splitlines()) + 1
        assert f"{last // 4 * 4}" in listed, listed


@pytest.mark.gate_cases("none", "topk")
@pytest.mark.parametrize(
    "codec",
    [pytest.param(text, id=text.partition(":")[0]) for text in ("none", "int8", "int4", "topk:0.1", "powersgd:2")],
)
def test_an_exchange_that_failed_and_lost_nobody_changes_nothing(tmp_path: Path, codec: str) -> None:
    ends = []
    for plant in ("nobody", "none"):
        ended = train(tmp_path / plant, "wide", plant, "7", "0", "save", keys=(f"codec={codec}",))
        assert ended.returncode == 0, ended.stderr
        said = "an exchange failed, and no rank is lost: 3 go on in step 7"
        assert (said in ended.stderr) == (plant == "nobody")
        ends += [end_of(tmp_path / plant, rank) for rank in range(3)]
    for end in ends[1:]:
        assert all(torch.equal(end[name], value) for name, value in ends[0].items())


def test_buffers_are_the_same_on_ranks_that_are_left(tmp_path: Path) -> None:
    ended = train(tmp_path, "wide", "kill", "2", "0", "save")
    assert ended.returncode == 0, ended.stderr
    assert "lost rank 1 of 3: 2 go on in step 4\n" in ended.stderr
    assert all(torch.equal(end_of(tmp_path, 2)[name], value) for name, value in end_of(tmp_path, 0).items())


@pytest.mark.parametrize("plant", ["when the others meet", "when the others connect"])
def test_one_more_rank_is_lost_in_the_middle_of_going_on(tmp_path: Path, plant: str) -> None:
    ended = train(tmp_path, "exact", plant, "2", "0", "save", ranks=4)
    assert ended.returncode == 0, ended.stderr
    assert "2 go on in step 4\n" in ended.stderr
    assert_is_that_of_one_process(tmp_path, [0, 2], *replay(tmp_path, {}))


def test_a_rank_that_did_not_hear_an_answer_is_told_it_and_the_others_wait_with_their_step(tmp_path: Path) -> None:
    ended = train(tmp_path, "exact", "unheard answer", "5", "0", "mean")
    assert ended.returncode == 0, ended.stderr
    assert "lost rank 1 of 3: 2 go on in step 6\n" in ended.stderr
    assert_is_that_of_one_process(tmp_path, [0, 2], *replay(tmp_path, {}))
    places = [json.loads((tmp_path / f"places{rank}.json").read_text()) for rank in (0, 2)]
    assert places[0] == places[1], "the ranks' loaders stand alike at the end of each step"


def test_the_first_exchange_is_made_again_with_what_travels_along(tmp_path: Path) -> None:
    ended = train(tmp_path, "exact", "in the first exchange", "0", "0", "alone")
    assert ended.returncode == 0, ended.stderr
    assert "an exchange failed, and no rank is lost: 3 go on in step 1\n" in ended.stderr
    assert_is_that_of_one_process(tmp_path, [0, 1, 2], *replay(tmp_path, {}))


def test_a_rank_that_did_not_hear_how_a_step_ended_has_its_means_all_the_same(tmp_path: Path) -> None:
    ended = train(tmp_path, "exact", "behind", "6", "0", "save")
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in (tmp_path / "log0.jsonl").read_text().splitlines()]
    seen = {index for epoch, _, ids, _ in rows if epoch == 0 for index in ids}
    others = [json.loads(line) for line in (tmp_path / "log2.jsonl").read_text().splitlines()]
    mine = [json.loads(line) for line in (tmp_path / "log1.jsonl").read_text().splitlines()]
    seen |= {index for epoch, _, ids, _ in [*others, *mine] if epoch == 0 for index in ids}
    missing = sorted(set(range(101)) - seen)
    assert len(missing) == 4, "the batch of the rank that died when all had its gradients"
    assert_is_that_of_one_process(tmp_path, [0, 2], *replay(tmp_path, {1: (0, 5, missing)}))


@pytest.mark.full("further")
@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (("on_failure=stop",), f"rank 1 on {socket.gethostname()} failed: killed by signal 9 (SIGKILL)"),
        (("tensor=3",), 'with on_failure = "continue" in an elastic job: a rank that is lost takes its part'),
    ],
)
def test_what_stops_a_job(tmp_path: Path, keys: tuple[str, ...], says: str) -> None:
    ended = train(tmp_path, "exact", "kill", "2", "0", "alone", keys=keys)
    assert ended.returncode in (2, 137), ended.stderr
    assert says in ended.stderr
