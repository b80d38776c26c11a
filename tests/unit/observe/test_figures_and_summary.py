"""Formulas by their worked examples; summaries of runs whose truth is known."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from farandole.core.vocabulary.errors import DataError
from farandole.observe.figures import figures
from farandole.observe.figures.inexact import warm_up
from farandole.observe.figures.summary import Summary, summarise, write_summary
from tests.unit.observe.runs import make_run


def test_worked_examples() -> None:
    assert figures.standard_deviation([1, 1, 1, 5]) == pytest.approx(1.732, abs=1e-3)
    assert figures.amdahl(0.6, 10) == pytest.approx(2.17, abs=5e-3)
    assert figures.amdahl(0.9, 10) == pytest.approx(5.26, abs=5e-3)
    assert figures.efficiency(figures.speedup(50.0, 90.0), 2) == pytest.approx(0.9)
    assert figures.throughput(100, 4) == 25
    assert math.isnan(figures.throughput(1, 0))
    assert figures.median([3, 1, 2]) == 2
    assert figures.median([4, 1, 2, 3]) == 2.5
    assert math.isnan(figures.standard_deviation([]))


@pytest.mark.parametrize(
    ("last_launch", "expected"),
    [(10.5, (0.5, 0.25)), (9.0, (0.0, 0.75)), (11.0, (0.75, 0.0)), (10.0, (0.0, 0.75))],
)
def test_a_wait_is_divided_at_the_last_ranks_launch(last_launch: float, expected: tuple[float, float]) -> None:
    assert figures.split_wait(10.0, 10.75, last_launch) == expected


def test_warm_up() -> None:
    assert [warm_up(steps) for steps in (1, 2, 5, 20, 100)] == [0, 1, 3, 3, 10]


def test_a_slow_rank_is_waited_for_and_the_wire_is_communication(tmp_path: Path) -> None:
    summary = summarise(make_run(tmp_path / "r", compute=[0.100, 0.150], wire=0.010, data=0.002))
    step = 0.162
    fast, slow = summary.ranks
    assert fast.shares["waiting"] == pytest.approx(0.050 / step, rel=1e-3)
    assert fast.shares["communication"] == pytest.approx(0.010 / step, rel=1e-3)
    assert fast.shares["data"] == pytest.approx(0.002 / step, rel=1e-3)
    assert slow.shares["waiting"] == pytest.approx(0.0, abs=1e-6)
    assert slow.shares["compute"] == pytest.approx(0.150 / step, rel=1e-3)
    assert summary.compute_deviation_seconds == pytest.approx(0.025, rel=1e-3)
    assert summary.compute_deviation_share == pytest.approx(0.2, rel=1e-3)
    assert summary.samples_per_second == pytest.approx(8 / step, rel=1e-3)
    assert summary.tokens_per_second == pytest.approx(16 / step, rel=1e-3)
    assert summary.sent_bytes_per_step == 1000
    assert (summary.first_loss, summary.last_loss) == (4.5, 0.7)
    assert sum(share or 0.0 for share in (summary.shares or {}).values()) == pytest.approx(1.0, abs=1e-6)


def test_several_hosts_have_no_common_clock(tmp_path: Path) -> None:
    summary = summarise(make_run(tmp_path / "r", compute=[0.1, 0.15], hosts=["a", "b"]))
    # The rank that waits least tells what the network takes.
    assert summary.ranks[0].shares["waiting"] == pytest.approx(0.050 / 0.162, rel=1e-3)
    assert summary.ranks[0].shares["communication"] == pytest.approx(0.010 / 0.162, rel=1e-3)


def test_speedup_against_the_newest_run_of_one_process_with_the_same_command(tmp_path: Path) -> None:
    make_run(tmp_path / "alone", compute=[0.2], samples=8)
    make_run(tmp_path / "something-else", compute=[0.1], samples=8, command=["python", "other.py"])
    run = make_run(tmp_path / "both", compute=[0.1, 0.1], wire=0.008)
    gain = summarise(run).comparison
    assert gain is not None
    assert Path(gain.baseline).name == "alone"
    assert gain.speedup == pytest.approx(0.202 / 0.110, rel=1e-3)
    assert gain.efficiency == pytest.approx(0.202 / 0.110 / 2, rel=1e-3)
    other = summarise(run, baseline=tmp_path / "something-else").comparison
    assert other is not None
    assert other.speedup == pytest.approx(0.102 / 0.110, rel=1e-3)
    wrong = summarise(run, baseline=run)
    assert wrong.comparison is None
    assert "is not a run of one process" in wrong.notes[-1]


def test_the_table_fits_a_terminal_and_the_file_holds_everything(tmp_path: Path) -> None:
    make_run(tmp_path / "alone", compute=[0.2], samples=8)
    run = make_run(tmp_path / "both", compute=[0.1, 0.1])
    summary = summarise(run)
    text = summary.to_text()
    assert max(map(len, text.splitlines())) <= 100
    for word in ("training time", "samples/s", "speedup", "exposed communication", "sent by a rank", "loss"):
        assert word in text
    write_summary(run, summary)
    stored = json.loads((run / "summary.json").read_text())
    assert stored["comparison"]["speedup"] == summary.comparison.speedup  # type: ignore[union-attr]
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["kind"] == "summary"
    assert last["steps"] == 20


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", compute=[0.1, 0.1, 0.1])
    (run / "events-rank1.jsonl").unlink()
    (run / "events-rank2.jsonl").write_text("garbage\n")
    summary = summarise(run)
    assert [rank.rank for rank in summary.ranks] == [0]
    assert any("the first line does not say whose" in note for note in summary.notes)
    assert any("2 of 3 ranks left no events" in note for note in summary.notes)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no steps were recorded" in summarise(empty).notes[-1]
    assert isinstance(summarise(empty), Summary)
    with pytest.raises(DataError, match="is not a run directory"):
        summarise(tmp_path / "nothing")


@pytest.mark.parametrize("size", ["two", None, -1, 1.5, True, [2]])
def test_a_size_that_is_none_is_taken_from_the_events(tmp_path: Path, size: object) -> None:
    run = make_run(tmp_path / "r", compute=[0.1, 0.1])
    (run / "run.json").write_text(json.dumps({"size": size}))
    summary = summarise(run)
    assert (summary.size, summary.steps, summary.notes) == (2, 20, [])


def test_one_step_and_no_samples(tmp_path: Path) -> None:
    summary = summarise(make_run(tmp_path / "r", compute=[0.1, 0.1], steps=1, samples=0, loss=False))
    assert summary.steps == 1
    assert summary.samples_per_second is None
    assert summary.last_loss is None
    assert any("samples are unknown" in note for note in summary.notes)
    assert summary.to_text()
