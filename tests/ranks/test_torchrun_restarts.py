"""Ranks that torchrun starts anew after one has failed: its agent's store still holds what the dead ones said."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ranks.pool import START_SECONDS, free_port, patient
from tests.ranks.started import started

pytestmark = pytest.mark.full("slow")

TRAINS = """
import os, signal, sys
from pathlib import Path
import torch
import farandole as fd

torch.set_num_threads(1)
how, mark = sys.argv[1], Path("failed")
if how == "early" and os.environ["RANK"] == "1" and not mark.exists():
    mark.touch()
    raise RuntimeError("before all have met")
if how == "backend":
    import farandole.backend
    torch.distributed.init_process_group("farandole")
world = fd.init()
fd.seed(0, per_rank=True)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.Adam(model.parameters())
model, optimizer = fd.distribute(model, optimizer)
saved = fd.Checkpointer("saved", model, optimizer, every_steps=2)
begin = step = saved.load() or 0
while step < 6:
    optimizer.zero_grad()
    model(torch.randn(4, 4)).square().mean().backward()
    optimizer.step()
    step += 1
    saved.after_step(step)
    if step == 5 and world.rank == 1 and not mark.exists():
        mark.touch()
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("boom")
saved.close()
Path(f"done {world.rank}").write_text(f"from {begin} {float(model.weight.detach().sum())}")
"""
MEETS = """
import time
import farandole as fd
world = fd.init(timeout_seconds=60)
print(fd.mean(float(world.rank)), flush=True)
time.sleep(600)
"""
NODES = {
    "standalone": [["--standalone", "--nproc-per-node", "2"]],
    "c10d": [["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:PORT"]] * 2,
    "static": [
        ["--nnodes", "2", "--node-rank", node, "--rdzv-backend", "static", "--master-addr", "localhost",
         "--master-port", "PORT"]
        for node in "01"
    ],
}  # fmt: skip


@patient
def test_ranks_meet_at_a_store_that_those_before_them_have_used(tmp_path: Path) -> None:
    agents = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    (tmp_path / "meets.py").write_text(MEETS)
    places = [
        {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
         "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agents.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        for rank in range(2)
    ]  # fmt: skip
    for attempt, order in enumerate(([0, 1], [1, 0], [0, 1])):
        directory = tmp_path / str(attempt)
        directory.mkdir()
        with started(directory, [str(tmp_path / "meets.py")], [places[rank] for rank in order]) as both:
            for rank in both:
                rank.wait_for("0.5")


@pytest.mark.parametrize(
    ("kind", "how"),
    [("standalone", "raises"), ("c10d", "raises"), ("static", "raises"), ("c10d", "killed"), ("c10d", "early"),
     ("standalone", "backend")],
)  # fmt: skip
@pytest.mark.timeout(60 + START_SECONDS)
def test_the_training_goes_on(kind: str, how: str, tmp_path: Path) -> None:
    (tmp_path / "trains.py").write_text(TRAINS)
    port = str(free_port())
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *(word.replace("PORT", port) for word in words),
             "--max-restarts", "1", "trains.py", how],
            cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for words in NODES[kind]
    ]  # fmt: skip
    try:
        said = [agent.communicate(timeout=START_SECONDS)[1] for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()  # it ends its ranks
            agent.wait(60)
    assert [agent.returncode for agent in agents] == [0] * len(agents), said
    done = [(tmp_path / f"done {rank}").read_text() for rank in range(2)]
    assert done[0] == done[1]
    assert done[0].startswith(("from 0",) if how == "early" else ("from 2", "from 4"))
