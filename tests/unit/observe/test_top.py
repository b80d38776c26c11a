"""`farandole top`: a run's state from files that grow, end, or are cut short; and how it is shown."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from farandole.core.vocabulary.errors import DataError
from farandole.core.vocabulary.run_files import FAILURE, RUN, SUMMARY, events_path
from farandole.observe.figures.live import read_state
from tests.unit.cli.test_cli import call
from tests.unit.observe.phased_run import STEP, make_phased_run

FARANDOLE = [sys.executable, "-m", "farandole"]


def test_the_state_of_a_run_that_goes_on(tmp_path: Path) -> None:
    state = read_state(make_phased_run(tmp_path / "r", steps=10))
    assert (state.name, state.status, state.is_over, state.size, state.alarms) == ("r", "running", False, 2, ())
    first, last = state.ranks
    assert (first.step, first.total_steps, first.phase) == (10, 10, "exchange")
    assert first.loss == pytest.approx(0.4)
    assert last.phase == "backward", "rank 1 is the slow one"
    assert first.step_seconds == pytest.approx(STEP)
    assert first.wait_share == pytest.approx(0.030 / STEP, rel=0.02)
    assert first.data_share == pytest.approx(0.002 / STEP, rel=0.02)
    assert first.sent_bytes_per_second == pytest.approx(8000 / STEP, rel=0.02)
    assert first.resident_bytes == 123_000_000


def test_the_newest_metrics_of_the_script_are_shown(tmp_path: Path) -> None:
    run = make_phased_run(tmp_path / "r", steps=5)
    rows = [{"kind": "metrics", "step": i, "values": {"accuracy": i / 8, "lr": 0.001}} for i in (1, 2, 5)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind":"metrics","ste')
    assert read_state(run).metrics == {"accuracy": 0.625, "lr": 0.001}
    assert "accuracy 0.625  lr 0.001" in call("top", str(run))[1]
    assert json.loads(call("top", str(run), "--json")[1])["metrics"]["lr"] == 0.001


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    run = make_phased_run(tmp_path / "r", steps=600)
    assert events_path(run, 0).stat().st_size > 2 * 128 * 1024
    begin = time.perf_counter()
    state = read_state(run)
    assert [rank.step for rank in state.ranks] == [600, 600]
    assert time.perf_counter() - begin < 2.0


def test_a_line_that_is_being_written_is_left_for_the_next_look(tmp_path: Path) -> None:
    run = make_phased_run(tmp_path / "r", steps=5)
    path = events_path(run, 0)
    whole = path.read_bytes()
    for cut in (1, 20, 200):
        path.write_bytes(whole[:-cut])
        assert read_state(run).ranks[0].step == 4
    path.write_bytes(whole + b"no json\n\xff\xfe\n")
    assert read_state(run).ranks[0].step == 5
    path.write_bytes(whole[:30])  # of the first line
    assert [rank.rank for rank in read_state(run).ranks] == [1]
    assert "1 of 2 ranks have written" in call("top", str(run))[1]


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    (tmp_path / RUN).write_text(json.dumps({"size": 2}))
    state = read_state(tmp_path)
    assert (state.status, state.ranks, state.size) == ("starting", (), 2)
    code, out, _ = call("top", str(tmp_path))
    assert code == 0
    assert "no rank has written yet" in out


@pytest.mark.parametrize("name", ["nothing", "empty"])
def test_what_is_no_run_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError):
        read_state(tmp_path / name)
    code, out, err = call("top", str(tmp_path / name))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1


def test_how_a_run_ended(tmp_path: Path) -> None:
    run = make_phased_run(tmp_path / "r")
    (run / SUMMARY).write_text("{}")
    assert (read_state(run).status, read_state(run).is_over) == ("the run has ended", True)
    (run / FAILURE).write_text(json.dumps({"rank": 1, "host": "b", "cause": "ValueError: boom"}))
    state = read_state(run)
    assert state.status == "the run has failed"
    assert state.alarms == ("rank 1 on b failed: ValueError: boom",)


def test_alarms(tmp_path: Path) -> None:
    run = make_phased_run(tmp_path / "r")
    now = time.time()
    os.utime(events_path(run, 1), (now - 30, now - 30))
    assert read_state(run, now).alarms == ("rank 1: no step for 30 s",)
    path = events_path(run, 0)
    path.write_text(path.read_text().replace('"loss":0.4', '"loss":NaN').replace('"loss": 0.4', '"loss": NaN'))
    assert "rank 0: the loss is nan" in read_state(run, now).alarms


def test_80_columns_and_json(tmp_path: Path) -> None:
    run = make_phased_run(tmp_path / "a-run", ranks=3)
    code, out, err = call("top", str(run), "--once")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert len(out.splitlines()) == 5
    assert "\x1b" not in out
    found = json.loads(call("top", str(run), "--json")[1])
    assert [rank["step"] for rank in found["ranks"]] == [10, 10, 10]


@pytest.mark.parametrize(
    ("words", "text"),
    [(["--every", "0"], "--every 0: expected seconds"), ([], "no RUN was given, and runs/ holds none")],
)
def test_bad_lines(words: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = call("top", *(["r"] if words else []), *words)
    assert code == 2
    assert text in err


def test_another_host_is_asked_over_ssh(tmp_path: Path) -> None:
    run = make_phased_run(tmp_path / "r")
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/host\nshift\nexec sh -c "$*"\n')
    ssh.chmod(0o755)
    words = ["top", f"node1:{run}", "--json", "--python", sys.executable, "--ssh-command", str(ssh)]
    done = subprocess.run([*FARANDOLE, *words], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["name"] == "r"
    assert (tmp_path / "host").read_text() == "node1\n"


@pytest.mark.parametrize("key", [b"q", b"\x03"])
def test_on_a_terminal_it_draws_until_q_or_ctrl_c(key: bytes, tmp_path: Path) -> None:
    run = make_phased_run(tmp_path / "r")
    process, terminal = pty.fork()
    if not process:
        os.execv(sys.executable, [*FARANDOLE, "top", str(run), "--every", "0.2"])
    drawn = b""
    deadline = time.monotonic() + 60
    pressed = False
    while time.monotonic() < deadline:
        ready, _, _ = select.select([terminal], [], [], 0.2)
        try:
            drawn += os.read(terminal, 65536) if ready else b""
        except OSError:
            break  # it has ended
        if not pressed and drawn.count(b"running") >= 2:
            os.write(terminal, key)
            pressed = True
    _, status = os.waitpid(process, 0)
    os.close(terminal)
    assert pressed, drawn
    assert os.waitstatus_to_exitcode(status) == 0
    assert b"Traceback" not in drawn
    assert b"\x1b[?25h" in drawn, "the cursor is back"
