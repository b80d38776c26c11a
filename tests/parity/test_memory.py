"""Peak memory of a training, measured beside stock `DistributedDataParallel` in fresh ranks.

Measured is memory in use: what the allocator keeps of freed memory depends on the order in which it was freed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest

from tests.warm import run

pytestmark = pytest.mark.full("slow")

SCRIPT = Path(__file__).parents[2] / "benchmarks/memory_vs_ddp.py"


def peak_over_gradients(trainer: str) -> float:
    """Return the peak of the rank that took most, in bytes of the model's gradients."""
    job = [sys.executable, str(SCRIPT), trainer, "--in-use"]
    with tempfile.TemporaryDirectory() as directory:
        done = run(Path(directory), "run", "-np", "2", "--quiet", "--", *job, timeout=50)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.removeprefix("[0] "))
    return float(result["peak_bytes"] / result["gradient_bytes"])


@pytest.mark.timeout(200)
def test_gradients_and_buckets_are_one_memory() -> None:
    """So the peak is that of DDP with `gradient_as_bucket_view`, and a copy of the gradients below stock DDP's."""
    peaks = {trainer: peak_over_gradients(trainer) for trainer in ("ddp", "ddp-view", "flat", "shared")}
    assert peaks["ddp"] > 3.0, f"DDP has momentum, gradients and buckets: {peaks}"
    assert 0.8 < peaks["ddp"] - peaks["ddp-view"] < 1.2, f"a copy of the gradients more or less is seen: {peaks}"
    for route in ("flat", "shared"):
        assert peaks[route] < peaks["ddp-view"] + 0.1, f"{route} needs what DDP with views needs: {peaks}"
