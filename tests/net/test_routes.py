"""Routes on emulated hosts: the one that is taken, the bytes on each host's link, and a rank that is killed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from farandole.comm.codecs.packing import Integers
from farandole.comm.codecs.quantize import piece_elements
from tests.leftovers import left_in_memory, memory_names
from tests.ranks.test_launch import FARANDOLE, gone_within, script
from tests.warm import run

pytestmark = pytest.mark.net

HOSTS = ["--hosts", "2", "--slots", "2", "--rate", "1gbit"]
STEPS = 4
ELEMENTS = 512 * 512 * 2
"""Of the two matrices; the biases are small."""
SET_UP_BYTES = 40_000
"""A host's, in the steps that are counted: flags of four ranks, recorders, barriers, acknowledgements."""

# Trains, counts what its host sent in some steps, and compares with one process on the joined batch.
TRAINS = """
import json, os, signal, sys, time
import torch, torch.distributed as dist
from torch import nn
import farandole as fd
from farandole.bench.intervals import sent_bytes
from farandole.train.verify.verify import fingerprint
from farandole.parallel.model import DistributedModel

plan = fd.Plan.from_mapping(json.loads(sys.argv[1]), where="test")
steps, kill_at = int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
world = fd.init(device="cpu")

def make():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512))
    return model, torch.optim.SGD(model.parameters(), 0.1)

def step(model, optimizer, x):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), x).backward()
    optimizer.step()

def write(**values):
    with open(f"said.{world.rank}", "w") as file:
        json.dump(values, file)

try:
    model, optimizer = fd.distribute(*make(), plan)
except fd.PlanError as problem:
    write(problem=str(problem))
    sys.exit(0)
x = torch.randn(24, 512, generator=torch.Generator().manual_seed(2))
mine = x.chunk(world.size)[world.rank]
step(model, optimizer, mine)
dist.barrier()
before = sent_bytes(loopback=False)
dist.barrier()
for i in range(steps):
    if i == kill_at and world.rank == 3:
        open("killed", "w").write(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    step(model, optimizer, mine)
dist.barrier()
sent = sent_bytes(loopback=False) - before
alone, its_optimizer = make()
for _ in range(steps + 1):
    step(alone, its_optimizer, x)
error = max((a - b).abs().max().item() for a, b in zip(model.parameters(), alone.parameters()))
reducer = DistributedModel.of(model).reducer
write(route=reducer.route, reason=reducer.route_reason, sent=sent, error=error, host=world.host,
      bits={name: fingerprint(tensor) for name, tensor in model.state_dict().items()})
"""


def train(
    directory: Path, hosts: Sequence[str] = HOSTS, size: int = 4, heard: list[str] | None = None, **plan: Any
) -> list[dict[str, Any]]:
    """Return what each rank said; all have the same bits. `heard` gets the lines of the standard error."""
    words = [json.dumps(plan), str(STEPS), "-1"]
    result = run(directory, "emulate", *hosts, "--", sys.executable, script(directory, TRAINS), *words, timeout=55)
    assert result.returncode == 0, result.stderr
    if heard is not None:
        heard += result.stderr.splitlines()
    said: list[dict[str, Any]] = [json.loads((directory / f"said.{rank}").read_text()) for rank in range(size)]
    assert all(each.get("bits") == said[0].get("bits") for each in said)
    return said


def check_bytes(said: list[dict[str, Any]], *payload: float) -> None:
    """Each host has sent the formula's bytes in each step, and headers, and little else.

    `payload`: one figure for all ranks, or one each.
    """
    for each, expected in zip(said, payload * (len(said) // len(payload)), strict=True):
        assert expected * STEPS <= each["sent"] <= 1.03 * expected * STEPS + SET_UP_BYTES, each["sent"] / STEPS


def packed_bytes(ranks: int) -> int:
    """Return the bytes of the matrices as int8, in pieces for so many ranks."""
    packer = Integers(8, 256, stochastic=False)
    return ranks * packer.packed_bytes(piece_elements(ELEMENTS, packer.block, ranks))


@pytest.mark.full("slow")
def test_hierarchical_is_taken_and_sends_each_byte_once(tmp_path: Path) -> None:
    said = train(tmp_path)
    assert {each["route"] for each in said} == {"hierarchical"}
    assert [each["host"] for each in said] == ["host0", "host0", "host1", "host1"]
    assert said[0]["reason"] == "2 hosts of 2 ranks, whose ranks share memory"
    assert max(each["error"] for each in said) < 1e-6
    check_bytes(said, 2 * (2 - 1) / 2 * 4 * ELEMENTS)


def test_hierarchical_with_a_codec_sends_the_packed_bytes(tmp_path: Path) -> None:
    said = train(tmp_path, codec="int8")
    assert {each["route"] for each in said} == {"hierarchical"}
    assert max(each["error"] for each in said) < 1e-3
    check_bytes(said, 2 * (2 - 1) / 2 * packed_bytes(2))


@pytest.mark.full("further")
def test_flat_is_a_ring_through_all_ranks(tmp_path: Path) -> None:
    said = train(tmp_path, route="flat")
    assert {each["route"] for each in said} == {"flat"}
    assert max(each["error"] for each in said) < 1e-6
    check_bytes(said, 2 * (4 - 1) / 4 * 4 * ELEMENTS)


@pytest.mark.full("slow")
def test_flat_with_a_codec_sends_as_often_as_a_host_has_ranks(tmp_path: Path) -> None:
    check_bytes(train(tmp_path, route="flat", codec="int8"), 2 * 2 * (2 - 1) / 2 * packed_bytes(4))


@pytest.mark.full("slow")
def test_auto_compares_the_routes_and_keeps_the_one_that_sends_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks of a host share its link: in a flat exchange each byte crosses three times as often."""
    heard: list[str] = []
    slow = ["--hosts", "2", "--slots", "2", "--rate", "100mbit"]
    monkeypatch.setenv("FARANDOLE_VERBOSE", "1")
    said = train(tmp_path, slow, heard=heard, codec="auto")
    assert {each["route"] for each in said} == {"hierarchical"}
    assert max(each["error"] for each in said) < 1e-6
    (line,) = [line for line in heard if "codec auto, Sequential: none" in line]
    assert "; route hierarchical, by flat " in line
    assert " Mbit/s a rank" in line


@pytest.mark.full("further")
def test_shared_is_refused_on_two_hosts(tmp_path: Path) -> None:
    for each in train(tmp_path, route="shared"):
        assert "route = 'shared', but the ranks are on 2 hosts" in each["problem"]


@pytest.mark.full("slow")
@pytest.mark.parametrize("plan", [{}, {"codec": "int8"}, {"route": "flat"}])
def test_a_killed_rank_is_named_and_nothing_is_left(tmp_path: Path, plan: dict[str, str]) -> None:
    before = memory_names()
    words = [script(tmp_path, TRAINS), json.dumps(plan), "99999", "5"]
    process = subprocess.Popen(
        [*FARANDOLE, "emulate", *HOSTS, "--", sys.executable, *words],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        _, said = process.communicate(timeout=50)
    finally:
        process.kill()
        process.communicate()
    ended = time.time()
    assert process.returncode == 137, said
    assert "rank 3 on host1" in said
    assert "SIGKILL" in said
    assert ended - float((tmp_path / "killed").read_text()) < 10
    assert gone_within([process.pid], 5)
    assert not left_in_memory(before)


def test_the_packed_size_is_what_the_packer_says() -> None:
    packer = Integers(8, 256, stochastic=False)
    packed = torch.empty(packer.packed_bytes(512), dtype=torch.uint8)
    packer.pack(torch.ones(512), packed, 0)
    assert packed_bytes(2) == ELEMENTS // 512 * packed.numel()
