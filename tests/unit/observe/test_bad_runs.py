"""Every command that reads a run, on every kind of damage: it says what is missing and shows what is there."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from farandole.cli.main import run
from farandole.core.vocabulary.errors import ConfigError
from farandole.observe.export.formats import export_run
from farandole.observe.records import timeline_reader as sampling
from farandole.observe.report.content import read
from farandole.observe.report.curves import rates
from farandole.observe.report.page import render

from .report.full_runs import full_run
from .runs import make_run

FORMATS = ("chrome", "tensorboard", "prometheus", "openmetrics")
Damage = Callable[[Path], object]


def events(path: Path, rank: int) -> Path:
    return path / f"events-rank{rank}.jsonl"


def cut(path: Path) -> None:
    file = events(path, 1)
    file.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3])


def corrupt(path: Path) -> None:
    lines = events(path, 1).read_bytes().splitlines(keepends=True)
    lines[9:9] = [b"\xff\xfe\x00 no line\n", b'{"step": "seven"}\n', b"[" * 20_000 + b"\n"]
    events(path, 1).write_bytes(b"".join(lines))


def newer(path: Path) -> None:
    head, _, rest = events(path, 2).read_text().partition("\n")
    events(path, 2).write_text(json.dumps({**json.loads(head), "version": 99}) + "\n" + rest)


def emptied(path: Path) -> None:
    events(path, 2).write_bytes(b"")


def without_offsets(path: Path) -> None:
    for file in path.glob("events-rank*.jsonl"):
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(line for line in lines if not line.startswith('{"clock"')))


def older(path: Path) -> None:
    """Rank 2's file is of version 1, which knows less."""
    old = make_run(path.parent / "old", compute=[0.1] * 4, steps=20)
    shutil.copy(events(old, 2), events(path, 2))


def simulated(path: Path) -> None:
    """An earlier version of ``farandole simulate`` wrote runs, too."""
    (path / "run.json").write_text(
        json.dumps({**json.loads((path / "run.json").read_text()), "simulated": {"steps": 4}})
    )


DAMAGES: list[tuple[str, Damage, str]] = [
    ("truncated", cut, "events-rank1.jsonl"),
    ("corrupt", corrupt, "events-rank1.jsonl:10"),
    ("newer", newer, "events of version 99"),
    ("older", older, ""),
    ("empty", emptied, "events-rank2.jsonl"),
    ("missing", lambda path: events(path, 3).unlink(), "1 of 4 ranks left no events (events-rank3.jsonl"),
    ("clocks", without_offsets, "clock"),
    ("simulated", simulated, "no rank ran"),
    ("no facts", lambda path: (path / "run.json").unlink(), ""),
]


@pytest.mark.parametrize(("damage", "says"), [pytest.param(d, s, id=name) for name, d, s in DAMAGES])
def test_what_is_missing_is_said_and_what_is_there_is_shown(
    damage: Damage, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = full_run(tmp_path / "whole", steps=12, buckets=2)
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    damage(path)
    assert run(["report", str(path)]) == 0
    page = (path / "report.html").read_text()
    notes = page.partition("notes on the records")[2].partition("</ul>")[0]
    assert says in notes, notes
    for section in ("step", "curves", "network", "balance", "environment"):
        assert f'<section id="{section}">' in page
    capsys.readouterr()
    assert run(["diagnose", str(path)]) == 0
    assert says in " ".join(capsys.readouterr().out.split())
    assert run(["compare", str(path), str(whole)]) == 0
    assert says in " ".join(capsys.readouterr().out.split())
    for name in FORMATS:
        assert run(["export", str(path), "--to", name]) == 0, name
        assert says in capsys.readouterr().err, name


def test_a_run_of_one_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = full_run(tmp_path / "run", ranks=1, steps=24, hosts=("node-a",))
    assert run(["report", str(path)]) == 0
    page = (path / "report.html").read_text()
    assert '<section id="step">' in page
    assert '<section id="balance">' not in page, "there is nothing to balance"
    assert run(["diagnose", str(path)]) == 0
    assert run(["compare", str(path), str(path)]) == 0
    assert all(run(["export", str(path), "--to", name]) == 0 for name in FORMATS)
    assert "Traceback" not in capsys.readouterr().err


WRITES_UNTIL_KILLED = """
import os, sys, time
from pathlib import Path
from farandole.core.vocabulary.events import DataWait, Phase, Started, StepDone
from farandole.observe.records.step_recorder import EventWriter, StepRecorder
import socket
writer = StepRecorder([EventWriter(Path(sys.argv[1]), 0)])
at = time.monotonic()
writer.record(Started(0, 2, socket.gethostname(), os.getpid(), 0, at, "2026-01-01T00:00:00", "a clock"))
for step in range(1, 10**9):
    writer.record(DataWait(at, at + 0.002, 4))
    writer.record(Phase("backward", at + 0.003, at + 0.009))
    at += 0.01
    writer.record(StepDone(step, at))
    time.sleep(0.001)
"""


def test_a_run_killed_by_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "run.json").write_text(json.dumps({"version": 1, "size": 2, "command": ["python", "train.py"]}))
    with subprocess.Popen([sys.executable, "-c", WRITES_UNTIL_KILLED, str(path)]) as process:
        until = time.monotonic() + 60
        while not (events(path, 0).exists() and events(path, 0).stat().st_size > 20_000):
            assert time.monotonic() < until, "nothing was written"
            time.sleep(0.05)
        assert run(["diagnose", str(path)]) == 0
        assert "it was killed" not in capsys.readouterr().out, "while it lives nobody says so"
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    killed = "the run left neither summary.json nor failure.json: it was killed, or its launcher was"
    assert run(["report", str(path)]) == 0
    page = (path / "report.html").read_text()
    assert killed in page
    assert "1 of 2 ranks left no events" in page
    assert '<section id="step">' in page
    capsys.readouterr()
    assert run(["diagnose", str(path)]) == 0
    assert killed in capsys.readouterr().out
    assert run(["compare", str(path), str(path)]) == 0
    assert killed in capsys.readouterr().out
    assert run(["export", str(path), "--to", "chrome"]) == 0
    assert killed in capsys.readouterr().err
    (path / "summary.json").write_text("{}")
    assert run(["diagnose", str(path)]) == 0
    assert "killed" not in capsys.readouterr().out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = full_run(tmp_path / "run", steps=6)
    (tmp_path / "full").symlink_to("/dev/full")
    for words in (["report", str(path)], ["export", str(path), "--to", "chrome"]):
        assert run([*words, "-o", str(tmp_path / "full")]) == 2
        err = capsys.readouterr().err
        assert "cannot write" in err
        assert "No space left on device" in err
    assert (tmp_path / "full").is_symlink(), "a device is written to, not replaced"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["full", "run"]


def test_places_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = full_run(tmp_path / "run", steps=6)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    before = sorted(tmp_path.rglob("*"))
    for place in (tmp_path / "folder", tmp_path / "file" / "x", Path("/proc/nowhere/x")):
        for words in (["report", str(path)], ["export", str(path), "--to", "chrome"]):
            assert run([*words, "-o", str(place)]) == 2, (words, place)
            assert str(place) in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before, "nothing is left behind"


@pytest.mark.full("further")
def test_200_000_events_are_read_in_bounded_memory_and_counted_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small next to `benchmarks/long_run_report.py`, and the budget too."""
    ranks, steps, buckets, budget = 2, 6_000, 11, 8_000
    path = full_run(tmp_path / "run", ranks=ranks, steps=10, buckets=buckets, hosts=("node-a",))
    period, sent, last_loss = _repeat(path, ranks, steps)
    first_loss = 0.0
    for rank in range(ranks):
        rows = events(path, rank).read_text().splitlines()
        first_loss += next(json.loads(row)["loss"] for row in rows if row.startswith('{"step":1,')) / ranks
    monkeypatch.setattr(sampling, "BUDGET", budget)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seen = read(path)
    grown_bytes = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert grown_bytes < 60e6, grown_bytes
    kept = sum(sampling.weight(row) for timeline in seen.timelines for row in timeline.steps)
    assert budget / 5 < kept <= budget
    assert all(len(timeline.thinned) <= len(timeline.steps) + 1 for timeline in seen.timelines)
    found = seen.summary
    assert (found.steps, found.samples) == (steps, 32 * ranks * steps)
    assert (found.first_loss, found.last_loss) == pytest.approx((first_loss, last_loss))
    assert found.training_seconds == pytest.approx(period * steps, rel=0.01)
    assert found.samples_per_second == pytest.approx(32 * ranks / period, rel=0.01)
    assert found.sent_bytes_per_step == pytest.approx(sent)
    rates_seen = [rate for _, rate in rates(seen.timelines)]
    assert min(rates_seen[1:-1]) > 0.9 * 32 * ranks / period, "steps without a row of their own count"
    assert len(render(seen)) < 500_000


def test_an_export_of_a_long_run_is_a_sample_or_the_whole_of_a_stretch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = full_run(tmp_path / "run", ranks=2, steps=120, buckets=2, hosts=("node-a",))
    monkeypatch.setattr(sampling, "BUDGET", 1_500)
    done = export_run(path, "chrome", tmp_path / "all.json")
    assert any("of the 120 steps of rank 0 are exported" in note for note in done.notes), done.notes
    stretch = export_run(path, "chrome", tmp_path / "some.json", steps=(41, 100))
    assert not any("exported" in note for note in stretch.notes)
    monkeypatch.undo()
    export_run(path, "chrome", tmp_path / "same.json", steps=(41, 100))
    assert (tmp_path / "some.json").read_text() == (tmp_path / "same.json").read_text()
    with pytest.raises(ConfigError, match="the run has rows of steps 1 to 120"):
        export_run(path, "chrome", tmp_path / "none.json", steps=(400, 500))


def _repeat(path: Path, ranks: int, steps: int) -> tuple[float, float, float]:
    """Make the run longer by repeating its last step; return a step's seconds, bytes and the last loss."""
    last = [json.loads(events(path, rank).read_text().splitlines()[-1]) for rank in range(ranks)]
    period = max(row["us"] for row in last) / 1e6
    for rank, row in enumerate(last):
        tail = json.dumps({key: value for key, value in row.items() if key not in ("step", "begin")})[1:]
        with events(path, rank).open("a") as file:
            for step in range(row["step"] + 1, steps + 1):
                begin = row["begin"] + period * (step - row["step"])
                file.write(f'{{"step": {step}, "begin": {begin:.6f}, {tail}\n')
    loss = sum(row["loss"] for row in last) / ranks
    return period, sum(exchange["sent"] for exchange in last[0]["exchanges"]), loss
