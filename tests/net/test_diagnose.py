"""A real training over a link of known rate: the price of the network, and whether a predicted gain comes true."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from farandole.launch.emulate.network import burst_bytes
from farandole.observe.diagnose import compare, diagnose, to_text
from tests.ranks.test_launch import run, script

pytestmark = pytest.mark.net

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
    assert first.seconds + plain.hidden_seconds == pytest.approx(wire, rel=0.15), to_text(plain)
    gain = next(fix.gain for fix in first.fixes if "codec=bf16" in fix.paste)
    assert gain is not None
    assert plain.step_seconds is not None
    assert half.step_seconds is not None
    assert gain.seconds == pytest.approx(plain.step_seconds - half.step_seconds, rel=0.15), to_text(half)
    difference = compare(middle["plain"], middle["half"])
    assert difference.outcome == "faster"
    assert "most of it in communication" in difference.verdict
