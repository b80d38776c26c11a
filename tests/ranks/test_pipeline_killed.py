"""A rank of a pipeline that is killed in the middle of a step: all others leave, and the cause is named."""

from __future__ import annotations

import json
import re
import socket
import sys
import time
from pathlib import Path

import pytest

from farandole.core.vocabulary.run_files import FAILURE
from tests.ranks.pool import patient
from tests.warm import run

PROGRAM = """
import os, signal, sys, time, torch, farandole as fd
from pathlib import Path
from torch import nn
class Deadly(nn.Linear):
    armed = False
    def forward(self, x):
        if self.armed:
            Path("killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)
here = fd.init()
model = nn.Sequential(*(Deadly(4, 4) for _ in range(8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
cuts = tuple("2 4 6".split()) if here.size == 4 else ("4",)
fd.distribute(model, optimizer, fd.Plan(pipeline=here.size, micro_batches=8, pipeline_cuts=cuts))
for step in range(8):
    if step == 4:
        model[2 if here.size == 4 else 4].armed = True  # in one rank's stage
    fd.step(model, nn.functional.mse_loss, torch.ones(8, 4), torch.ones(8, 4))
    optimizer.step()
"""


@pytest.mark.full("slow")
@pytest.mark.alone
@patient
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_killed_in_a_step_ends_all_within_five_seconds(size: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    result = run(tmp_path, "run", "-np", str(size), "--", sys.executable, str(script))
    seconds = time.time() - float((tmp_path / "killed").read_text())
    assert seconds < 5.0, f"{seconds:.2f} s after the kill: {result.stderr}"
    assert result.returncode == 137, result.stderr
    host = re.escape(socket.gethostname())
    assert re.search(rf"rank 1 on {host} failed.*killed by signal 9 \(SIGKILL\)", result.stderr), result.stderr
    assert "another process killed it; the kernel's out-of-memory killer did not act" in result.stderr
    (file,) = tmp_path.glob(f"runs/*/{FAILURE}")
    account = json.loads(file.read_text())
    noticed, stopped = set(account["also_failed"]), set(account["stopped"])
    assert noticed | stopped == set(range(size)) - {1}, "a neighbour notices, who does not is stopped"
    for rank in noticed:
        (log,) = tmp_path.glob(f"runs/*/logs/rank_{rank}.log")
        assert "another rank closed its connection" in log.read_text(), rank
