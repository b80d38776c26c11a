"""Ranks that train on their own, on emulated hosts: what crosses the link, and what is chosen for which link."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from farandole.comm.codecs.packing import Integers
from farandole.comm.codecs.quantize import piece_elements
from tests.ranks.test_launch import script
from tests.warm import run

pytestmark = pytest.mark.net

ELEMENTS = 512 * 512 * 2
"""Of the two matrices; the biases are small."""
PERIOD = 5
AGREEING_BYTES = 12_000
"""What ranks say of a meeting before it, flags, recorders, barriers, acknowledgements."""

TRAINS = """
import json, sys, time
import torch, torch.distributed as dist
from torch import nn
import farandole as fd
from farandole.bench.intervals import sent_bytes
from farandole.parallel.model import DistributedModel

plan, steps, seconds = json.loads(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
torch.set_num_threads(1)
world = fd.init(device="cpu")
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
fd.distribute(model, optimizer, fd.Plan.from_mapping(plan, where="test"))
x = torch.randn(16, 512, generator=torch.Generator().manual_seed(world.rank))
sent, ends = [], [time.monotonic()]
for _ in range(steps):
    before = sent_bytes(loopback=False)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), x).backward()
    time.sleep(seconds)
    optimizer.step()
    dist.barrier()
    sent.append(sent_bytes(loopback=False) - before)
    ends.append(time.monotonic())
policy = DistributedModel.of(model).policy
with open(f"said.{world.rank}", "w") as file:
    json.dump({"sent": sent, "local": policy.is_local, "seconds": [b - a for a, b in zip(ends, ends[1:])]}, file)
fd.drain(model)
fd.shutdown()
"""


def train(
    directory: Path, rate: str, steps: int, seconds: float, heard: list[str] | None = None, **plan: Any
) -> list[dict[str, Any]]:
    """Return what each of two ranks said."""
    words = [json.dumps(plan), str(steps), str(seconds)]
    hosts = ["--hosts", "2", "--slots", "1", "--rate", rate]
    result = run(directory, "emulate", *hosts, "--", sys.executable, script(directory, TRAINS), *words, timeout=80)
    assert result.returncode == 0, result.stderr
    if heard is not None:
        heard += result.stderr.splitlines()
    return [json.loads((directory / f"said.{rank}").read_text()) for rank in range(2)]


@pytest.mark.full("slow")
@pytest.mark.parametrize("codec", ["none", "int4"])
def test_a_meeting_sends_what_one_exchange_does_and_nothing_is_sent_between(codec: str, tmp_path: Path) -> None:
    packer = Integers(4, 256, stochastic=False)
    coded = 2 * packer.packed_bytes(piece_elements(ELEMENTS, packer.block, 2))
    expected = 4 * ELEMENTS if codec == "none" else coded
    for each in train(tmp_path, "100mbit", 4 * PERIOD, 0.0, sync=f"diloco:H={PERIOD}", codec=codec):
        for step, sent in enumerate(each["sent"], start=1):
            if step % PERIOD:
                assert sent <= AGREEING_BYTES, (step, sent)
            else:
                assert expected <= sent <= 1.06 * expected + AGREEING_BYTES, (step, sent)


@pytest.mark.full("slow")
@pytest.mark.parametrize(("rate", "local"), [("5mbit", True), ("1gbit", False)])
def test_auto_takes_local_steps_on_a_slow_link_and_claims_nothing_on_a_fast_one(
    rate: str, local: bool, tmp_path: Path
) -> None:
    heard: list[str] = []
    said = train(tmp_path, rate, 30, 0.15, heard, sync="auto", codec="auto", lossy=True)
    assert [each["local"] for each in said] == [local, local]
    (line,) = [line for line in heard if "sync auto, Sequential:" in line]
    assert (": local:H=" in line) is local, line
