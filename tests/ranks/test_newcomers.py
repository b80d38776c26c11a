"""Ranks that come in while others train: the place of a lost one is taken between two steps."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from tests.ranks.test_redone_steps import MODEL, assert_is_that_of_one_process, end_of, replay, run

TRAINING = (
    """
import json, os, sys, time
import torch
from torch import nn
import farandole as fd
from farandole.comm.engine.redo import StepRedo
from farandole.core.env import read_elastic_settings
from farandole.core.vocabulary.errors import PeerLost
from farandole.train.checkpoint import newcomers

kind, plant, at = sys.argv[1], sys.argv[2], int(sys.argv[3])
me = read_elastic_settings().worker
here = fd.init(timeout_seconds=20)
if me >= 3:
    assert here.rank and here.size == 1, "no script takes it for rank 0"
def dies(*_):
    os.kill(os.getpid(), 9)
if plant == "dies when it meets the others" and me == 3:
    StepRedo.meet_as_new = dies
if plant == "dies when it has met them" and me == 3:
    newcomers._begin_again = dies
if plant == "dies at the end" and me == 3:
    newcomers.seed_new_rank = dies
if plant in ("dies in distribute", "dies in distribute of the states") and me == 3:
    from farandole.parallel import distribute
    def alone_or(call):
        return lambda *words: dies() if here.size > 1 else call(*words)
    name = "compare_models" if plant == "dies in distribute" else "broadcast_optimizer"
    setattr(distribute, name, alone_or(getattr(distribute, name)))
if plant == "rank 0 dies in it" and me == 0:
    newcomers._ModelsOwn.put = dies
if plant == "one breaks off":  # who heard the question, and not its answer, when the others leave their generation
    ask, is_planted = StepRedo.ask, [False]
    def forgetful(self, question):
        answer = ask(self, question)
        if me == 2 and isinstance(answer, list) and answer[2:3] == [1.0] and not is_planted[0]:
            is_planted[0] = True
            time.sleep(0.3)  # the others leave meanwhile
            self._done -= 1
            def lost():
                raise PeerLost("planted", rank=2, operation="a question")
            return ask(self, lost)
        return answer
    StepRedo.ask = forgetful
class Judge:
    def state_dict(self):
        return {"weights": torch.arange(3.0), "name": "judge"}
    def load_state_dict(self, state):
        assert state["weights"].tolist() == [0.0, 1.0, 2.0] and state["name"] == "judge"
        if plant in ("refuses the state", "catches the error"):
            raise ValueError("not mine")
"""
    + MODEL
    + """
torch.manual_seed(me)  # whose values are of no use
model = make_model(kind)
if plant == "another model" and me >= 3:
    model.append(nn.Linear(8, 8).double())
kinds = torch.float64 if kind == "exact" else torch.float32
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
fd.distribute(model, optimizer)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
numbers = torch.Generator().manual_seed(1)
xs, ys = (torch.randn(101, 8, generator=numbers, dtype=kinds) for _ in range(2))
if plant == "other data" and me == 3:
    ys += 1
data = torch.utils.data.TensorDataset(xs, ys, torch.arange(101))
plain = torch.utils.data.DataLoader(data, 4, shuffle=True, drop_last=kind == "wide")
loader = fd.shard(plain)
others = {"loader": loader, "scheduler": scheduler, "judge": Judge()}
if plant == "keeps its loader":
    del others["loader"]
saver = fd.Checkpointer("saved", model, optimizer, every_steps=7, **others)
if plant == "loads nothing":
    done = 0
elif plant == "catches the error":
    try:
        done = saver.load() or 0
    except Exception:
        done = 0
else:
    done = saver.load() or 0
log = open(f"log{me}.jsonl", "w")
for epoch in range(loader.state_dict()["epoch"], 2):
    for x, y, ids in loader:
        if me == 1 and done == at:
            os.kill(os.getpid(), 9)
        if me == 3 and plant == "dies in its first step":
            os.kill(os.getpid(), 9)
        time.sleep(0.15 if plant == "slow" else 0.02)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        print(json.dumps([epoch, done, ids.tolist(), here.session.batch_weight.factor]), file=log, flush=True)
        done += 1
        saver.after_step(done)
saver.close()
torch.save(model.state_dict(), f"end{me}.pt")
"""
)


def train(
    directory: Path, *words: str, options: tuple[str, ...] = ("--spares", "1")
) -> subprocess.CompletedProcess[str]:
    """Train on three ranks of which one may be lost; `words`: kind of model, what is planted, when one is lost."""
    return run(directory, TRAINING, words, *options, ranks=3, keys=("check_every=1",))


def test_a_spare_takes_the_place_of_a_lost_rank_as_if_one_process_saw_the_same_batches(tmp_path: Path) -> None:
    ended = train(tmp_path, "exact", "nothing", "4")
    assert ended.returncode == 0, ended.stderr
    assert "lost rank 1 of 3: 2 go on in step 5\n" in ended.stderr
    assert "rank 2 came in: 3 go on in step " in ended.stderr
    assert_is_that_of_one_process(tmp_path, [0, 2, 3], *replay(tmp_path, {}))
    assert not (tmp_path / "end1.pt").exists()
    last = json.loads((tmp_path / "log3.jsonl").read_text().splitlines()[-1])[1] + 1
    manifest = tmp_path / "saved" / f"step-{last // 7 * 7:08d}" / "manifest.json"
    assert json.loads(manifest.read_bytes())["world_size"] == 3, "one that came in saves, too"


@pytest.mark.full("further")
@pytest.mark.parametrize("codec", ["int8", "topk:0.1", "powersgd:2"])
def test_ranks_are_alike_where_codecs_keep_something(tmp_path: Path, codec: str) -> None:
    ended = train(tmp_path, "wide", "nothing", "4", options=("--spares", "1", "--set", f"codec={codec}"))
    assert ended.returncode == 0, ended.stderr
    assert "rank 2 came in: 3 go on in step " in ended.stderr
    first, *others = (end_of(tmp_path, rank) for rank in (0, 2, 3))
    assert all(torch.equal(each[name], value) for each in others for name, value in first.items())


@pytest.mark.gate_cases("dies in distribute", "rank 0 dies in it", "another model")
@pytest.mark.parametrize(
    "plant",
    ["dies when it meets the others", "dies when it has met them", "dies at the end", "dies in its first step",
     "rank 0 dies in it", "one breaks off", "refuses the state", "other data", "keeps its loader",
     "dies in distribute", "dies in distribute of the states", "another model", "catches the error"],
)  # fmt: skip
def test_a_rank_is_lost_while_another_comes_in(tmp_path: Path, plant: str) -> None:
    ended = train(tmp_path, "exact", plant, "4", options=("--spares", "3" if plant == "another model" else "1"))
    assert ended.returncode == 0, ended.stderr
    came_in = plant in ("rank 0 dies in it", "one breaks off")
    left = [2, 3] if plant == "rank 0 dies in it" else [0, 2, 3] if came_in else [0, 2]
    says = {
        "refuses the state": "not mine",
        "other data": "digest of the data",
        "keeps its loader": "all loaders to",
        "another model": "parameter",
        "catches the error": "1 ranks train on different samples",
    }
    if plant == "catches the error":
        (tmp_path / "log3.jsonl").unlink()  # it has made no step
    assert says.get(plant, "") in ended.stderr
    assert sorted(tmp_path.glob("end*.pt")) == [tmp_path / f"end{rank}.pt" for rank in left]
    assert_is_that_of_one_process(tmp_path, left, *replay(tmp_path, {}))


def test_a_spare_that_loads_nothing_makes_no_step_and_the_others_do_not_care(tmp_path: Path) -> None:
    ended = train(tmp_path, "exact", "loads nothing", "4")
    assert ended.returncode == 0, ended.stderr
    assert "worker 3 came later than the others, and has made a step without their state" in ended.stderr
    assert_is_that_of_one_process(tmp_path, [0, 2], *replay_of(tmp_path, 0, 1, 2))


def replay_of(directory: Path, *workers: int) -> tuple[torch.nn.Module, dict[int, list[int]]]:
    """Return `replay` of the logs of these."""
    for path in directory.glob("log*.jsonl"):
        if path.name not in [f"log{worker}.jsonl" for worker in workers]:
            path.unlink()
    return replay(directory, {})


@pytest.mark.full("slow")
def test_a_rank_that_is_started_again_comes_in(tmp_path: Path) -> None:
    ended = train(
        tmp_path, "exact", "slow", "4", options=("--blacklist-cooldown-range", "1", "1", "--max-np", "3")
    )
    assert ended.returncode == 0, ended.stderr
    assert "rank 2 came in: 3 go on in step " in ended.stderr
    assert_is_that_of_one_process(tmp_path, [0, 2, 3], *replay(tmp_path, {}))
