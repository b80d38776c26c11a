"""Ranks that stand still: seen after the limit, and never because the watcher itself was away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from farandole.launch.supervise.stopped_process import LOOK_SECONDS, FrozenWatch, behind_shells, state_of


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def stopped() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        process.send_signal(signal.SIGSTOP)
        wait_for(lambda: state_of(process.pid) == "T")
        try:
            yield process
        finally:
            process.kill()


def looks(watch: FrozenWatch, processes: dict[int, int], begin: float, seconds: float) -> list[float]:
    """Look at regular times; return those at which something was found."""
    times = [begin + index * LOOK_SECONDS for index in range(int(seconds / LOOK_SECONDS) + 1)]
    return [now - begin for now in times if watch.look(now, processes)]


def test_a_stopped_rank_is_found_after_the_limit(stopped: subprocess.Popen[bytes]) -> None:
    found = looks(FrozenWatch(1.0), {0: os.getpid(), 3: stopped.pid}, 100.0, 2.0)
    assert 1.0 - 1e-6 <= found[0] <= 1.0 + 2 * LOOK_SECONDS
    watch = FrozenWatch(0.5)
    assert looks(watch, {3: stopped.pid}, 100.0, 0.4) == []
    (rank,) = watch.look(101.0, {0: os.getpid(), 3: stopped.pid})
    assert (rank.rank, rank.when_seconds) == (3, 100.0)
    assert looks(FrozenWatch(0.0), {3: stopped.pid}, 100.0, 60.0) == []


def test_one_that_goes_on_begins_anew(stopped: subprocess.Popen[bytes]) -> None:
    watch = FrozenWatch(1.0)
    assert looks(watch, {3: stopped.pid}, 100.0, 0.8) == []
    stopped.send_signal(signal.SIGCONT)
    wait_for(lambda: state_of(stopped.pid) == "S")
    assert looks(watch, {3: stopped.pid}, 101.0, 2.0) == []
    stopped.send_signal(signal.SIGSTOP)
    wait_for(lambda: state_of(stopped.pid) == "T")
    assert looks(watch, {3: stopped.pid}, 104.0, 0.8) == []


def test_a_job_that_was_suspended_as_a_whole_has_no_frozen_rank(stopped: subprocess.Popen[bytes]) -> None:
    watch = FrozenWatch(1.0)
    assert looks(watch, {3: stopped.pid}, 100.0, 0.4) == []
    assert watch.look(4000.0, {3: stopped.pid}) == []  # the watcher comes back first, an hour later
    stopped.send_signal(signal.SIGCONT)
    wait_for(lambda: state_of(stopped.pid) == "S")
    assert looks(watch, {3: stopped.pid}, 4000.2, 3.0) == []


def test_a_debuggers_stop_is_no_fault() -> None:
    text = "import ctypes, os, signal; ctypes.CDLL(None).ptrace(0, 0, 0, 0); os.kill(os.getpid(), signal.SIGTRAP)"
    with subprocess.Popen([sys.executable, "-c", text]) as process:
        wait_for(lambda: state_of(process.pid) in ("t", "Z"))
        assert state_of(process.pid) == "t", "tracing is not allowed here"
        found = looks(FrozenWatch(0.5), {0: process.pid}, 100.0, 3.0)
        process.kill()
    assert found == []


def test_the_program_behind_a_shell_is_looked_at() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 600; true"]) as shell:
        try:
            wait_for(lambda: behind_shells(shell.pid) != shell.pid)
            inner = behind_shells(shell.pid)
            wait_for(lambda: Path(f"/proc/{inner}/cmdline").read_bytes().startswith(b"sleep"))
            os.kill(inner, signal.SIGSTOP)
            wait_for(lambda: state_of(inner) == "T")
            wait_for(lambda: state_of(shell.pid) == "S")  # on a busy machine it has not come to waiting yet
            assert looks(FrozenWatch(0.5), {0: shell.pid}, 100.0, 2.0)
        finally:
            os.kill(behind_shells(shell.pid), signal.SIGKILL)
            shell.kill()


def test_a_process_that_is_gone() -> None:
    with subprocess.Popen(["true"]) as process:
        pass
    assert (state_of(process.pid), behind_shells(process.pid)) == ("", process.pid)
