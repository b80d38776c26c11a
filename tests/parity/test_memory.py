"""Peak memory of a training, measured beside stock `DistributedDataParallel` in fresh ranks.

Measured is memory in use: what the allocator keeps of freed memory depends on the order in which it was freed.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from pathlib import Path

import pytest

from tests.warm import run

SCRIPT = Path(__file__).parents[2] / "benchmarks/memory_vs_ddp.py"


@functools.cache
def peak_over_gradients(trainer: str) -> float:
    """Return the peak of the rank that took most, in bytes of the model's gradients."""
    job = [sys.executable, str(SCRIPT), trainer, "--in-use"]
    with tempfile.TemporaryDirectory() as directory:
        done = run(Path(directory), "run", "-np", "2", "--quiet", "--", *job, timeout=50)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.removeprefix("[0] "))
    return float(result["peak_bytes"] / result["gradient_bytes"])


def test_a_second_copy_of_the_gradients_is_seen() -> None:
    """DDP has momentum, gradients and buckets; as views of buckets the gradients take nothing more."""
    assert peak_over_gradients("ddp") > 3.0
    assert 0.9 < peak_over_gradients("ddp") - peak_over_gradients("ddp-view") < 1.1


@pytest.mark.parametrize("route", ["flat", "shared"])
def test_gradients_and_buckets_are_one_memory(route: str) -> None:
    """So the peak is that of DDP with `gradient_as_bucket_view`, and a copy of the gradients below stock DDP's."""
    assert peak_over_gradients(route) < peak_over_gradients("ddp-view") + 0.1
    assert peak_over_gradients(route) < peak_over_gradients("ddp") - 0.8
