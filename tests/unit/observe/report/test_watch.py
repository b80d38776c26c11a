"""The report that is written again and again: it ends when the run ends, however that is known."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from farandole.core.vocabulary.errors import ConfigError, DataError
from farandole.core.vocabulary.events import Started, StepDone
from farandole.observe.records.run_reader import SILENT_SECONDS, why_ended
from farandole.observe.records.step_recorder import EventWriter, StepRecorder
from farandole.observe.report import watch_report
from tests.unit.observe.report.full_runs import full_run

REFRESH = '<meta http-equiv="refresh"'


def still_running(directory: Path, process_id: int, *, host: str | None = None) -> Path:
    directory.mkdir()
    writer = StepRecorder([EventWriter(directory, 0)])
    host = socket.gethostname() if host is None else host
    writer.record(Started(0, 1, host, process_id, 0, 1.0, "2026", "c"))
    for step in range(1, 5):
        writer.record(StepDone(step, 1.0 + step))
    writer.close()
    return directory


def test_it_is_written_while_the_run_goes_on_and_a_last_time_when_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = still_running(tmp_path / "r", os.getpid())
    seen: list[tuple[str, float]] = []
    said: list[str] = []

    def sleep(seconds: float) -> None:
        seen.append(((run / "report.html").read_text(), seconds))
        if len(seen) == 3:
            (run / "summary.json").write_text("{}")

    monkeypatch.setattr(time, "sleep", sleep)
    path = watch_report(run, every_seconds=2.0, say=said.append)
    assert len(seen) == 3
    assert all(REFRESH in html and seconds >= 2.0 for html, seconds in seen)
    assert REFRESH not in path.read_text()
    assert said == [f"{path} is kept up to date; Ctrl-C ends it", "the run has ended"]


def test_a_run_that_has_just_been_made_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "r"
    run.mkdir()
    waits = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            full_run(run, steps=4)
            (run / "summary.json").write_text("{}")

    monkeypatch.setattr(time, "sleep", sleep)
    assert watch_report(run).exists()
    with pytest.raises(DataError, match="is not a run directory"):
        watch_report(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="0 seconds between two pages"):
        watch_report(run, every_seconds=0.0)


def test_a_run_that_is_taken_away_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = still_running(tmp_path / "r", os.getpid())
    monkeypatch.setattr(time, "sleep", lambda seconds: shutil.rmtree(run))
    with pytest.raises(DataError):
        watch_report(run)


@pytest.mark.parametrize(
    ("leave", "why"),
    [
        (lambda run: (run / "summary.json").write_text("{}"), "the run has ended"),
        (lambda run: (run / "failure.json").write_text("{}"), "the run has failed"),
        (lambda run: None, ""),
    ],
)
def test_how_an_end_is_known(tmp_path: Path, leave: Callable[[Path], object], why: str) -> None:
    run = still_running(tmp_path / "r", os.getpid())
    leave(run)
    assert why_ended(run, time.time()) == why


def test_processes_of_this_host_that_are_gone_and_silence_of_others(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(20)
    assert "none of its processes" in why_ended(still_running(tmp_path / "a", gone.pid), time.time())
    far = still_running(tmp_path / "b", gone.pid, host="elsewhere")
    assert why_ended(far, time.time()) == ""
    assert "nothing was recorded for" in why_ended(far, time.time() + SILENT_SECONDS + 1)


def test_ctrl_c_leaves_a_page_that_stands_still_and_no_traceback(tmp_path: Path) -> None:
    run = still_running(tmp_path / "r", os.getpid())
    command = [sys.executable, "-m", "farandole", "report", str(run), "--watch", "--every", "0.5"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "is kept up to date" in process.stderr.readline()
        assert REFRESH in (run / "report.html").read_text()
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in rest
    assert REFRESH not in (run / "report.html").read_text()
