"""SIGKILL at random moments of saves: what is there afterwards is whole, and the writer is gone."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from farandole.checkpoint.directory import all_steps, remove_leftovers, saved_steps
from farandole.checkpoint.listing import verify_checkpoint

SCRIPT = Path(__file__).with_name("checkpoint_writer_script.py")


@pytest.mark.timeout(90)
def test_a_kill_leaves_whole_checkpoints(tmp_path: Path) -> None:
    moments, last = random.Random(7), 0
    for _ in range(12):
        process = subprocess.Popen([sys.executable, str(SCRIPT), str(tmp_path)], start_new_session=True)
        end = time.monotonic() + 20
        while max(saved_steps(tmp_path), default=0) <= last and time.monotonic() < end:
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.05))
        process.kill()
        process.wait()
        steps = saved_steps(tmp_path)
        assert steps, "an earlier one is lost"
        assert steps[-1] > last
        last = steps[-1]
        for step in steps:
            verify_checkpoint(tmp_path, step)
        wait_for_writer(tmp_path)
        for step in all_steps(tmp_path):
            remove_leftovers(tmp_path, step)
        assert all_steps(tmp_path) == steps


def wait_for_writer(directory: Path) -> None:
    """The writer dies with its rank: nothing writes below the directory any more."""
    end = time.monotonic() + 10
    while str(directory).encode() in b"".join(open_files()):
        assert time.monotonic() < end, "the writer outlived its rank"
        time.sleep(0.01)


def open_files() -> list[bytes]:
    """Return the files that processes have open."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            found.append(str(link.readlink()).encode())
        except OSError:
            continue
    return found
