"""A real training over a link of known rate: the price of the network, and whether a predicted gain comes true."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from farandole.launch.namespaces import burst_bytes
from farandole.observe.diagnose import Diagnosis, compare, diagnose, to_text
from tests.ranks.test_launch import script
from tests.warm import run

pytestmark = [pytest.mark.full("busy"), pytest.mark.net, pytest.mark.alone]

LAYERS, WIDTH = 4, 256
BYTES = 4 * LAYERS * WIDTH * WIDTH
"""What each of two ranks sends a step: a ring sends 2 (2 - 1) / 2 times the gradients."""
BYTES_PER_SECOND = 0.956 * 100e6 / 8
"""100 Mbit/s of frames, less their headers."""

TURNS = 3
"""A busy machine disturbs one of them: of each kind the middle run, by its steps, is looked at."""
KINDS = [("plain", "none"), ("half", "bf16")]

TRAINS = f"""
import os, time, torch
from torch import nn
import farandole as fd

class Computes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(0.005)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.005)
        return grad

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({LAYERS}))

    def forward(self, x):
        for layer in self.layers:
            x = Computes.apply(layer(x))
        return x

torch.set_num_threads(1)
os.environ.pop("FARANDOLE_RUN_DIR", None)  # several runs in one job
for name, codec in [(f"{{kind}}{{turn}}", codec) for turn in range({TURNS}) for kind, codec in {KINDS}]:
    fd.init(run_dir=name, device="cpu")
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    plan = fd.Plan(codec=codec, bucket_bytes={4 * WIDTH * WIDTH}, first_bucket_bytes=65536)
    fd.distribute(model, optimizer, plan)
    for _ in range(16):
        optimizer.zero_grad()
        model(torch.randn(4, {WIDTH})).square().mean().backward()
        optimizer.step()
    fd.shutdown()
"""


def on_the_wire(diagnosis: Diagnosis) -> float:
    """Return how long the exchange of a mean step took, exposed or hidden."""
    [exposed] = [finding.seconds for finding in diagnosis.findings if finding.kind == "communication"]
    return exposed + diagnosis.hidden_seconds


def test_a_slow_link_its_price_and_the_gain_of_a_codec(tmp_path: Path) -> None:
    command = [sys.executable, script(tmp_path, TRAINS)]
    result = run(tmp_path, "emulate", "--hosts", "2", "--rate", "100mbit", "--", *command, timeout=55)
    assert result.returncode == 0, result.stderr
    runs = {kind: [tmp_path / f"{kind}{turn}" for turn in range(TURNS)] for kind, _ in KINDS}
    middle = {
        kind: sorted(paths, key=lambda run: diagnose(run).step_seconds or 1e9)[TURNS // 2]
        for kind, paths in runs.items()
    }
    plain, half = diagnose(middle["plain"]), diagnose(middle["half"])
    first = plain.findings[0]
    assert (plain.bound, first.phase, first.ranks) == ("communication", "exchange", ()), to_text(plain)
    wire = (BYTES - burst_bytes(100e6)) / BYTES_PER_SECOND
    assert on_the_wire(plain) == pytest.approx(wire, rel=0.15), to_text(plain)
    gain = next(fix.gain for fix in first.fixes if "codec='bf16'" in fix.paste)
    assert gain is not None
    # Where the step gets shorter is the wire: other programs make computing longer in one run and not in another.
    assert gain.seconds == pytest.approx(on_the_wire(plain) - on_the_wire(half), rel=0.15), to_text(half)
    difference = compare(middle["plain"], middle["half"])
    assert difference.outcome == "faster"
    assert "most of it in communication" in difference.verdict


RING = (
    TRAINS.split("os.environ.pop", maxsplit=1)[0]
    + """
import sys
fd.init(device="cpu")
model = Model()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
fd.distribute(model, optimizer, fd.Plan(bucket_bytes=262144, first_bucket_bytes=65536))
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(4, 256)).square().mean().backward()
    optimizer.step()
fd.shutdown()
"""
)


def test_the_host_whose_link_is_slow_both_ways_is_named_and_what_a_good_link_saves(tmp_path: Path) -> None:
    # In a ring of three all ranks send the same and wait alike: the kernels alone know whose link is never empty.
    found = {}
    for name, rate, steps in (("slow", "50mbit", 24), ("good", "1gbit", 44)):
        shape = ["--hosts", "3", "--rate", "1gbit", "--script", f"0s:1={rate}"]
        job = ["farandole", "run", "--run-dir", name, "--", sys.executable, script(tmp_path, RING), str(steps)]
        result = run(tmp_path, "emulate", *shape, "--", *job, timeout=55)
        assert result.returncode == 0, result.stderr
        found[name] = diagnose(tmp_path / name)
    slow, good = found["slow"], found["good"]
    first = slow.findings[0]
    assert (slow.bound, first.kind) == ("communication", "slow-link"), to_text(slow)
    assert (first.ranks, first.hosts) == ((1,), ("host1",)), to_text(slow)
    assert "slow-link" not in {finding.kind for finding in good.findings}, to_text(good)
    gain = first.fixes[0].gain
    assert gain is not None
    assert slow.step_seconds is not None
    assert good.step_seconds is not None
    assert gain.seconds == pytest.approx(slow.step_seconds - good.step_seconds, rel=0.15), to_text(good)


SHARDED = f"""
import time, torch
from torch import nn
import farandole as fd

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear({WIDTH}, {WIDTH}, bias=False)

    def forward(self, x):
        time.sleep(0.005)
        return self.linear(x).tanh()

torch.set_num_threads(1)
fd.init(device="cpu")
model = nn.Sequential(*(nn.Sequential(Block(), Block()) for _ in range(2)))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
fd.distribute(model, optimizer, fd.Plan(zero=3))
for _ in range(16):
    optimizer.zero_grad()
    model(torch.randn(4, {WIDTH})).square().mean().backward()
    optimizer.step()
fd.shutdown()
"""


def test_communication_of_sharded_parameters_is_seen_and_weighed(tmp_path: Path) -> None:
    """ZeRO stage 3 over a link: each of four blocks is gathered twice and reduced once, half by each rank."""
    job = ["farandole", "run", "--run-dir", "sharded", "--", sys.executable, script(tmp_path, SHARDED)]
    result = run(tmp_path, "emulate", "--hosts", "2", "--rate", "100mbit", "--", *job, timeout=55)
    assert result.returncode == 0, result.stderr
    found = diagnose(tmp_path / "sharded")
    first = found.findings[0]
    assert (found.bound, first.kind, first.ranks) == ("communication", "communication", ()), to_text(found)
    sent = next(e for e in first.evidence if "sent" in e or "sends" in e)
    assert sent.startswith("a rank sends 1.57 MB a step in 13 exchanges"), sent
    assert first.seconds > 0.5 * (3 * BYTES / 2) / BYTES_PER_SECOND, to_text(found)
    line = "model, optimizer = fd.distribute(model, optimizer, fd.Plan({}))"
    keys = {"zero=3, weight_codec='int8'", "zero=3, codec='int8'", "zero=2"}
    assert {line.format(each) for each in keys} <= {fix.paste for fix in first.fixes}, to_text(found)


LAZY = """
import json, os, socket, time
from farandole.observe.records.host_sampler import read_connections
if os.environ["RANK"] == "0":
    with socket.create_server((socket.gethostname(), 5000)) as server:
        peer = server.accept()[0]
    time.sleep(1.5)  # the window closes, and the other rank has something on its way all the time
    while peer.recv(1 << 20):
        pass
else:
    for _ in range(400):
        try:
            peer = socket.create_connection(("host0", 5000))
            break
        except OSError:
            time.sleep(0.02)
    peer.sendall(bytes(12_000_000))
    time.sleep(0.2)
    [count] = read_connections().values()
    peer.close()
    json.dump(count._asdict(), open("count.json", "w"))
"""


def test_waiting_for_a_rank_that_does_not_read_is_not_the_links_time(tmp_path: Path) -> None:
    command = [sys.executable, script(tmp_path, LAZY)]
    result = run(tmp_path, "emulate", "--hosts", "2", "--rate", "1gbit", "--", *command)
    assert result.returncode == 0, result.stderr
    count = json.loads((tmp_path / "count.json").read_text())
    assert (count["own_address"], count["peer_address"]) == ("10.211.0.2", "10.211.0.1")
    assert count["sent_bytes"] == pytest.approx(12_000_000, rel=0.01)
    assert 12_000_000 * 8 / 1e9 * 0.5 < count["busy_seconds"] < 0.7
