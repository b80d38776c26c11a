"""What is said of where ranks stood when a job hung."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from farandole.core.failures import Position
from farandole.core.vocabulary.run_files import Crash, position_path, stacks_path
from farandole.launch.supervise.failure import Exit, find_failure, is_hang
from farandole.launch.supervise.stacks import (
    StackTaker,
    find_py_spy,
    read_current_stacks,
    read_stacks,
    where_they_stood,
)
from farandole.launch.supervise.stopped_process import FROZEN_KIND

ANSWER = """Thread 0x00007f0000000001 (most recent call first):
  File "threading.py", line 1 in wait

Current thread 0x00007f000000000{rank} (most recent call first):
  File "train.py", line 7 in {where}
  File "train.py", line 9 in <module>
"""
SPIED = """Process 10: python train.py
Python v3.11.7 (/usr/bin/python)

Thread 10 (idle): "MainThread"
    stuck (train.py:6)
    <module> (train.py:8)
"""
IMPORTS = """Current thread 0x00007f0000000001 (most recent call first):
  File "<frozen importlib._bootstrap>", line 1176 in _find_and_load
  File "train.py", line 3 in <module>
"""
FROZEN = Crash(2, "b", None, FROZEN_KIND, "stopped by a signal for 1.5 s", "", False, 1, 1.0)


def write(directory: Path, rank: int, text: str) -> None:
    path = stacks_path(directory, rank)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def raised(rank: int, step: int, trace: str = "Traceback\nKeyError: 'lr'") -> Crash:
    return Crash(rank, "b", step, "KeyError", "'lr'", trace, False, 1, 1.0)


def test_a_traceback_says_enough_and_no_rank_is_said_to_stand(tmp_path: Path) -> None:
    write(tmp_path, 0, ANSWER.format(rank=0, where="distribute"))
    exits = [Exit(1, 1, 1.0), Exit(0, -15, 2.0, stopped_by_us=True)]
    failure = find_failure(exits, [raised(1, 5)], host="b", stop_seconds=0.5)
    failure = replace(failure, stacks=read_stacks(tmp_path))
    assert failure.stacks
    assert "stood at" not in failure.to_text(tmp_path)
    timed_out = replace(failure, traceback="RuntimeError: [gloo] Timed out waiting 1000ms for recv operation")
    assert "rank 0 stood at" in timed_out.to_text(tmp_path), "of a time-out the stacks say more"
    path = position_path(tmp_path, 0)
    path.parent.mkdir()
    path.write_text(Position(0, 4, "pause", "train.py:11", "the phase 'evaluation'").to_json())
    said = timed_out.to_text(tmp_path)
    assert "rank 0 was in the phase 'evaluation' at train.py:11, and the others wait for timeout_seconds" in said
    killed = replace(failure, traceback="", stacks={}).to_text(tmp_path)
    assert "evaluation" not in killed, "a rank that was killed waited for none"
    assert "the stacks of all threads" not in killed


def test_stacks_of_ranks_that_have_done_steps_since_are_left_out(tmp_path: Path) -> None:
    for rank, step in ((0, 0), (1, 4), (2, 5)):
        write(tmp_path, rank, ANSWER.format(rank=rank, where="distribute"))
        path = position_path(tmp_path, rank)
        path.parent.mkdir(exist_ok=True)
        path.write_text(Position(rank, step, "waiting").to_json())
    write(tmp_path, 3, ANSWER.format(rank=3, where="distribute"))
    assert set(read_current_stacks(tmp_path, 5)) == {1, 2, 3}, "one step apart, they may wait for each other"
    assert set(read_current_stacks(tmp_path, None)) == {0, 1, 2, 3}
    raised(1, 5, "").write(tmp_path)
    assert set(read_current_stacks(tmp_path, None)) == {2, 3}, "a rank's own account says how far it came"


def test_frames_of_the_import_system_are_not_shown() -> None:
    assert list(where_they_stood({0: IMPORTS})) == [([0], ['File "train.py", line 3 in <module>'])]
    assert list(where_they_stood({0: IMPORTS.replace('File "train.py"', 'File "<frozen runpy>"')})) == []


def test_the_report_says_where_ranks_stood(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path, rank, ANSWER.format(rank=rank, where="wait_for_all"))
    write(tmp_path, 2, SPIED)
    write(tmp_path, 3, "")
    exits = [Exit(rank, -15, 2.0, stopped_by_us=True) for rank in range(4)]
    failure = find_failure(exits, [FROZEN], host="b", stop_seconds=0.5)
    failure = replace(failure, stacks=read_stacks(tmp_path))
    lines = failure.to_text(tmp_path).splitlines()
    assert lines[0] == "farandole: rank 2 on b failed: stopped by a signal for 1.5 s"
    assert "FARANDOLE_FROZEN_SECONDS=0" in lines[1]
    at = lines.index("farandole: ranks 0 and 1 stood at")
    assert lines[at + 1 : at + 3] == [
        '  File "train.py", line 7 in wait_for_all',
        '  File "train.py", line 9 in <module>',
    ]
    at = lines.index("farandole: rank 2 stood at")
    assert lines[at + 1] == "  stuck (train.py:6)"
    failure.write(tmp_path)
    assert set(json.loads((tmp_path / "failure.json").read_text())["stacks"]) == {"0", "1", "2"}
    assert not stacks_path(tmp_path, 3).exists()


def test_a_frozen_rank_that_wakes_up_and_ends_well_is_still_the_cause() -> None:
    exits = [Exit(2, 0, 2.0), Exit(0, 0, 2.0)]
    failure = find_failure(exits, [FROZEN], host="b", stop_seconds=0.5)
    assert (failure.rank, failure.exit_code, failure.step) == (2, 1, None)


def test_what_counts_as_a_hang() -> None:
    assert is_hang([], [FROZEN])
    assert is_hang([], [replace(FROZEN, kind="Stalled")])
    assert is_hang([Exit(0, 1, 1.0, held="RuntimeError: Timed out waiting 1800000ms for recv\n")], [])
    assert not is_hang([Exit(0, 1, 1.0, held="KeyError: 1\n")], [replace(FROZEN, kind="KeyError")])


def test_nothing_is_read_where_nobody_wrote(tmp_path: Path) -> None:
    assert read_stacks(tmp_path) == {}
    write(tmp_path, 0, "")
    assert read_stacks(tmp_path) == {}
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_does_not_listen_is_not_ended_by_the_question(tmp_path: Path) -> None:
    text = "import time\ndef stands_here():\n    print('up', flush=True)\n    time.sleep(600)\nstands_here()"
    taker = StackTaker(tmp_path)
    with subprocess.Popen([sys.executable, "-S", "-c", text], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGSTOP)
        taker.take({5: process.pid})
        deadline = time.monotonic() + 20
        path = stacks_path(tmp_path, 5)
        while find_py_spy() and time.monotonic() < deadline and not (path.exists() and path.stat().st_size):
            time.sleep(0.05)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.2)
        taker.take({5: process.pid})
        time.sleep(0.2)
        taker.close()
        assert process.poll() is None
        process.kill()
    if find_py_spy():
        assert "stands_here" in read_stacks(tmp_path)[5]
