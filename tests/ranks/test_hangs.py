"""Jobs that stand still, with real processes: the report names who, and says where every rank stood."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

import tests.ranks.pool
from tests import warm
from tests.ranks.pool import LIMIT_SECONDS, START_SECONDS, Pool, _Job, patient, ranks
from tests.ranks.test_launch import FARANDOLE, alive, gone_within, run, script, start_waiting

STUCK = """
import time, farandole as fd
from farandole.comm.world import store_sync
world = fd.init()
world.timeout_seconds = 1.0

def forgets_the_others():
    time.sleep(600)

if world.rank == 1:
    forgets_the_others()
with fd.phase("waiting"):
    store_sync.all_gather_json(world, "lunch", "here")
"""


def failure_of(directory: Path) -> dict[str, Any]:
    (path,) = (directory / "runs").glob("*/failure.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.full("busy")
@pytest.mark.alone  # a busy machine is given more time
def test_a_rank_that_is_stopped_ends_the_job_within_three_seconds(tmp_path: Path) -> None:
    process, pids = start_waiting(tmp_path, 2)
    frozen = int((tmp_path / "pids.1").read_text().split()[0])
    begin = time.monotonic()
    os.kill(frozen, signal.SIGSTOP)
    _, err = process.communicate(timeout=30)
    seconds = time.monotonic() - begin
    assert gone_within(pids, 1.0), alive(pids)
    assert process.returncode == 1
    assert "farandole: rank 1 on " in err
    assert "failed: stopped by a signal (SIGSTOP or its like) for 1.5 s" in err
    assert failure_of(tmp_path)["rank"] == 1
    assert seconds < 3.0 or os.getloadavg()[0] > 2 * (os.cpu_count() or 1), seconds


@pytest.mark.full("slow")
def test_a_hang_is_reported_with_the_stacks_of_all_ranks(tmp_path: Path) -> None:
    words = ("run", "-np", "2", "--no-bind", "--", sys.executable, script(tmp_path, STUCK))
    result = run(tmp_path, *words, timeout=120)
    assert result.returncode == 1
    first = next(line for line in result.stderr.splitlines() if line.startswith("farandole: rank"))
    assert "rank 1 did not get here within 1 s" in first
    failure = failure_of(tmp_path)
    assert "store_sync.py" in failure["stacks"]["0"], failure["stacks"]
    assert "in forgets_the_others" in failure["stacks"]["1"], failure["stacks"]
    report = result.stderr.partition("farandole: rank 1 stood at\n")[2]
    assert re.match(r'  File ".*/script.py", line \d+ in forgets_the_others\n', report), result.stderr
    (run_directory,) = (tmp_path / "runs").iterdir()
    assert len(list((run_directory / "stacks").iterdir())) == 2


@patient
def test_a_job_that_ends_well_leaves_no_stacks(tmp_path: Path) -> None:
    result = warm.run(
        tmp_path, "run", "-np", "1", "--", sys.executable, "-c", "import farandole as fd; fd.init()", timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert not list((tmp_path / "runs").glob("*/stacks"))


@pytest.mark.full("further")
def test_a_rank_may_be_stopped_when_that_is_asked_for(tmp_path: Path) -> None:
    text = 'import os, signal\nif os.environ["RANK"] == "1":\n    open("pid", "w").write(str(os.getpid()))\n'
    text += "    os.kill(os.getpid(), signal.SIGSTOP)\n"
    with subprocess.Popen(
        [*FARANDOLE, "run", "-np", "2", "--", sys.executable, "-S", script(tmp_path, text)],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "FARANDOLE_FROZEN_SECONDS": "0"},
    ) as launcher:  # fmt: skip
        deadline = time.monotonic() + 20
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(3.0)
        assert launcher.poll() is None
        rank = int((tmp_path / "pid").read_text())
        assert psutil.Process(rank).status() == psutil.STATUS_STOPPED
        os.kill(rank, signal.SIGCONT)
        assert launcher.wait(20) == 0


def test_a_setting_that_is_none(tmp_path: Path) -> None:
    result = run(tmp_path, "run", "-np", "1", "--", "true", environment={"FARANDOLE_FROZEN_SECONDS": "soon"})
    assert result.returncode == 2
    assert "FARANDOLE_FROZEN_SECONDS='soon': expected a number of seconds" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.full("further")
@pytest.mark.timeout(60 + START_SECONDS)
def test_a_pool_whose_start_was_cut_short_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that was started and never heard is not asked to play the next job."""
    made = Pool()
    monkeypatch.setattr(Connection, "poll", _out_of_time)
    with pytest.raises(TimeoutError):
        made.play(1, _Job(__file__, "nothing", {}, {}, 30.0))
    monkeypatch.undo()
    try:
        made.play(1, _Job(__file__, "nothing", {}, {}, 30.0))
    finally:
        made.close()


def _out_of_time(*_: object) -> bool:
    raise TimeoutError("the test's time is over")


def nothing() -> None:
    """A job that ends well."""


@ranks(1)
def test_what_a_rank_has_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tests.ranks.pool, "LIMIT_SECONDS", 0.0)


@ranks(1)
def test_what_a_rank_has_patched_is_undone_for_the_next_job() -> None:
    assert LIMIT_SECONDS == tests.ranks.pool.LIMIT_SECONDS


@ranks(1)
def _imports_what_is_not_installed() -> None:
    pytest.importorskip("there_is_no_such_package")


def test_what_is_not_installed_skips_the_test_on_its_ranks() -> None:
    with pytest.raises(pytest.skip.Exception, match="there_is_no_such_package"):
        _imports_what_is_not_installed()
