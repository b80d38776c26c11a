"""Events on disk and the progress line."""

from __future__ import annotations

import contextlib
import io
import json
import os
import stat
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.core.vocabulary.errors import DataError
from farandole.core.vocabulary.events import DataWait, Exchange, Logged, Started, StepDone
from farandole.observe.figures.summary import summarise
from farandole.observe.records.line_file import LineFile
from farandole.observe.records.progress import (
    MetricsWriter,
    TerminalProgress,
    latest_progress,
    progress_line,
)
from farandole.observe.records.step_recorder import EventWriter, StepRecorder
from farandole.observe.records.timeline_reader import read_events
from tests.unit.observe.runs import make_run


def test_a_round_trip(tmp_path: Path) -> None:
    run = make_run(tmp_path, compute=[0.1, 0.2], steps=3)
    timeline = read_events(run / "events-rank1.jsonl")
    assert (timeline.started.rank, timeline.started.size, timeline.skipped) == (1, 2, [])
    assert [row.step for row in timeline.steps] == [1, 2, 3]
    row = timeline.steps[1]
    assert row.exchanges[0].wait_begin_seconds == pytest.approx(100.212 + 0.202, abs=1e-5)
    assert (row.samples, row.tokens, row.total_steps, row.loss) == (4, 8, 3, 3.0)
    assert stat.S_IMODE((run / "events-rank1.jsonl").stat().st_mode) == 0o600


def test_a_file_cut_short_or_damaged_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = make_run(tmp_path, compute=[0.1], steps=5) / "events-rank0.jsonl"
    lines = path.read_text().splitlines()
    lines[2] = lines[2][:20]
    lines[3] = lines[3].replace('"samples":4', '"samples":"many"')
    path.write_text("\n".join(lines) + "\n" + '{"step": 6, "beg')
    timeline = read_events(path)
    assert [row.step for row in timeline.steps] == [1, 4, 5]
    assert [note.split(":")[1] for note in timeline.skipped] == ["3", "4", "7"]
    assert timeline.skipped[-1].endswith("cut short")
    assert timeline.skipped[0] == "events-rank0.jsonl:3: no record: not JSON"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty: a rank first writes when"),
        ("[]\n", "does not say whose"),
        ('{"version": 1}\n', "does not say whose"),
        ('{"version": 99, "rank": 0}\n', "events of version 99, this farandole reads up to 2"),
        ('{"version": 1, "rank": "x", "size": 1, "host": "", "process_id": 1, "generation": 0, '
         '"begin_seconds": 0, "wall_time": ""}\n', "must be whole numbers"),
    ],
)  # fmt: skip
def test_files_that_are_none_of_ours(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "events-rank0.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=words):
        read_events(path)
    with pytest.raises(DataError, match="cannot read"):
        read_events(tmp_path / "missing")


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.jsonl"
    started = b'{"version": 1, "rank": 0, "size": 1, "host": "", "process_id": 1, "generation": 0, '
    started += b'"begin_seconds": 0, "wall_time": ""}\n'
    for content in (data, started + data):
        path.write_bytes(content)
        with contextlib.suppress(DataError):
            read_events(path)


def test_a_full_disk_stops_the_recording_not_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = LineFile(Path("/dev/full"))
    lines._flushed = 0.0
    for _ in range(3):
        lines.write({"x": "y" * 10000})
    lines.close()
    assert "recording stops, cannot write /dev/full" in capsys.readouterr().err


def test_the_first_line_is_on_disk_at_once(tmp_path: Path) -> None:
    """A rank that is killed in its first second leaves a file that says whose it is."""
    lines = LineFile(tmp_path / "lines.jsonl")
    lines.write({"rank": 1})
    assert (tmp_path / "lines.jsonl").read_text() == '{"rank":1}\n'
    lines.write({"step": 1})
    assert "step" not in (tmp_path / "lines.jsonl").read_text(), "the others wait for each other"
    lines.close()


def test_a_rank_of_several_generations_is_one_timeline(tmp_path: Path) -> None:
    """As an elastic job writes it: each generation begins with a header, and the number of ranks changes."""
    for rank, generations in ((0, (1, 2)), (1, (2,))):
        for generation in generations:
            writer = StepRecorder([EventWriter(tmp_path, rank)])
            writer.record(Started(rank, generation, "h", 1, generation, float(generation), ""))
            writer.record(StepDone(1, generation + 0.5))
            writer.close()
    timeline = read_events(tmp_path / "events-rank0.jsonl")
    assert timeline.skipped == []
    assert [row.end_seconds for row in timeline.steps] == [1.5, 2.5]
    (tmp_path / "run.json").write_text('{"version": 1, "elastic": true}')
    summary = summarise(tmp_path)
    assert (summary.size, summary.steps) == (2, 2)
    assert not [note for note in summary.notes if "no record" in note]


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    writer = StepRecorder([EventWriter(tmp_path, 0)])
    writer.record(Started(0, 1, "h", 1, 0, 0.0, ""))
    child = os.fork()
    if child == 0:
        writer.record(StepDone(1, 1.0))
        writer.close()
        os._exit(0)
    os.waitpid(child, 0)
    writer.record(StepDone(1, 2.0))
    writer.close()
    assert [row.end_seconds for row in read_events(tmp_path / "events-rank0.jsonl").steps] == [2.0]


def test_recording_is_cheap(tmp_path: Path) -> None:
    """Not a measurement (that is in benchmarks/): a guard against something a hundred times too slow."""
    writer = StepRecorder([EventWriter(tmp_path, 0), MetricsWriter(tmp_path)])
    writer.record(Started(0, 2, "h", 1, 0, 0.0, ""))
    launches = tuple(float(i) for i in range(30))
    begin = time.perf_counter()
    for step in range(1, 201):
        writer.record(DataWait(step, step + 0.1, 4))
        writer.record(Exchange(launches, step + 0.5, step + 0.6, 1))
        writer.record(StepDone(step, step + 1.0))
    assert (time.perf_counter() - begin) / 200 < 5e-3
    writer.close()


def test_metrics_and_the_latest_line(tmp_path: Path) -> None:
    assert latest_progress(tmp_path) is None
    writer = StepRecorder([MetricsWriter(tmp_path)])
    writer.record(Started(0, 2, "h", 1, 0, 100.0, ""))
    for step in range(1, 5):
        writer.record(DataWait(99.0 + step, 99.1 + step, 8))
        writer.record(Exchange((99.5 + step,), 99.7 + step, 99.9 + step, 1))
        writer.record(Logged(loss=2.0 / step, tokens=64, total_steps=10))
        writer.record(StepDone(step, 100.0 + step))
    writer.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    last = rows[-1]
    assert last["samples_per_second"] == 16
    assert last["tokens_per_second"] == 128
    assert (last["data_share"], last["wait_share"], last["left_seconds"]) == (0.1, 0.2, 6.0)
    assert latest_progress(tmp_path) == "step 4/10  loss 0.5  16 samples/s  128 tokens/s  6 s left"
    (tmp_path / "metrics.jsonl").write_text("garbage\n[]\n")
    assert latest_progress(tmp_path) is None


def test_metrics_of_the_script_are_written_with_their_steps(tmp_path: Path) -> None:
    """The newest value of each name and tenth of a second; what waits is written at the end."""
    writer = StepRecorder([MetricsWriter(tmp_path)])
    writer.record(Started(0, 1, "h", 1, 0, 0.0, ""))
    for step in range(1, 101):
        writer.record(Logged(metrics={"lr": step / 10}))
        if step == 50:
            writer.record(Logged(metrics={"accuracy": 0.5}))
        writer.record(StepDone(step, step * 0.001))
    writer.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rows = [
        (row["step"], name, value)
        for row in lines
        if row["kind"] == "metrics"
        for name, value in row["values"].items()
    ]
    assert rows[0] == (1, "lr", 0.1)
    assert rows[-1] == (100, "lr", 10.0)
    assert (50, "accuracy", 0.5) in rows
    assert len(rows) < 60, "not each of a hundred quick steps"
    assert latest_progress(tmp_path) is not None, "a line of progress is found behind them"


def test_rows_are_thinned_but_the_last_always_comes(tmp_path: Path) -> None:
    writer = StepRecorder([MetricsWriter(tmp_path)])
    writer.record(Started(0, 1, "h", 1, 0, 0.0, ""))
    for step in range(1, 101):
        writer.record(Logged(total_steps=100))
        writer.record(StepDone(step, step * 0.001))
    writer.close()
    rows = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [1, 100]


def test_a_line_without_samples_or_loss() -> None:
    assert progress_line({"step": 3, "seconds": 0.25}) == "step 3  250 ms a step"
    assert progress_line({"step": 3, "seconds": 0.25, "skipped_steps": 2}) == "step 3  250 ms a step  2 skipped"
    assert progress_line({"step": 3, "seconds": 0.25, "loss": 1.5}) == "step 3  loss 1.5  250 ms a step"


def test_the_first_step_has_no_rate() -> None:
    first = {"step": 1, "seconds": 2.0, "samples_per_second": 8.0, "tokens_per_second": 80.0}
    assert progress_line(first) == "step 1"
    assert progress_line({**first, "step": 2}) == "step 2  8 samples/s  80 tokens/s"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("live", [True, False])
def test_the_line_that_no_launcher_draws(live: bool) -> None:
    stream = Terminal() if live else io.StringIO()
    progress = StepRecorder([TerminalProgress(stream)])
    progress.record(Started(0, 1, "h", 1, 0, 0.0, ""))
    for step in range(1, 31):
        progress.record(StepDone(step, float(step)))
    progress.close()
    text = stream.getvalue()
    if live:
        assert text.count("\r\x1b[K") == 30
        assert text.endswith("step 30  1 s a step\n")
    else:
        # The first row is step 1's, which is not worth a line; then one comes every `PLAIN_SECONDS`.
        assert text.splitlines() == ["step 11  1 s a step", "step 21  1 s a step"]
