"""Workers of loaders that get SIGTERM: they live as long as their rank listens, and no longer."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests import warm

# A worker gets a signal between two batches; its rank then draws another, and ends with the worker alive.
TEXT = """
import os, signal, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
import farandole as fd
from farandole.train.data.worker_cores import sparing_workers

def main():
    if sys.argv[1] == "its own handler":
        signal.signal(signal.Signals[sys.argv[2]], lambda number, _: None)
    if sys.argv[1] == "fd.preempted":
        fd.preempted()
    persistent = DataLoader(
        TensorDataset(torch.arange(100.0)), batch_size=1, num_workers=1, persistent_workers=True, prefetch_factor=1
    )
    with sparing_workers(persistent):
        batches = iter(persistent)
    next(batches)
    os.kill(batches._workers[0].pid, signal.Signals[sys.argv[2]])
    time.sleep(0.3)
    for _ in range(5):
        next(batches)
    assert batches._workers[0].is_alive()
    assert persistent.worker_init_fn is None
    print("went on", flush=True)

main()
"""


@pytest.mark.full_cases("its own handler-SIGTERM", "not at all-SIGUSR1")
@pytest.mark.parametrize(
    ("listens", "number"),
    [("its own handler", "SIGTERM"), ("fd.preempted", "SIGTERM"), ("fd.preempted", "SIGUSR1"),
     ("not at all", "SIGTERM"), ("not at all", "SIGUSR1")],
)  # fmt: skip
def test_a_worker_leaves_the_signal_to_a_rank_that_listens(tmp_path: Path, listens: str, number: str) -> None:
    (tmp_path / "script.py").write_text(TEXT)
    begin = time.monotonic()
    done = warm.python(tmp_path, "script.py", listens, number, timeout=50)
    assert time.monotonic() - begin < 20, "a worker that heeds no signal is not waited for"
    if listens == "not at all":
        assert "is killed by signal: " in done.stderr
        assert done.returncode == 1
    else:
        assert (done.stdout, done.returncode) == ("went on\n", 0), done.stderr
