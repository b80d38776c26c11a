"""Steps of a loop that is not torch's: callbacks, marks and exchanges become steps, phases and verdicts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from farandole.comm.world.session import Session
from farandole.core.vocabulary import events
from farandole.core.vocabulary.events import BucketFacts, BucketTimes, Event, Exchange, Phase, Started
from farandole.horovod.exchange import step_watch
from farandole.horovod.exchange.step_watch import Finished, Mark, Round, StepWatch
from farandole.horovod.named_ops.operations import Travel
from farandole.observe.diagnose import diagnose, to_text
from farandole.observe.figures.summary import NOT_DIVIDED, summarise
from farandole.observe.records.rows import StepRow
from farandole.observe.records.step_recorder import EventWriter, StepBuilder, StepRecorder
from farandole.observe.records.timeline_reader import read_events
from farandole.train.stall_watcher import open_phases

FACTS = (BucketFacts(4000, "none", ("kernel", "bias")),)


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Rows:
    """A recorder that keeps the rows of steps."""

    def __init__(self, also: Any = None) -> None:
        self._builder = StepBuilder()
        self._also = also
        self.rows: list[StepRow] = []
        self.events: list[Event] = []
        self.record(Started(0, 2, "a", 1, 0, 100.0, "", "clock"))

    def record(self, event: Event) -> None:
        self.events.append(event)
        if self._also is not None:
            self._also.record(event)
        row = self._builder.take(event)
        if row is not None:
            self.rows.append(row)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(step_watch, "time", SimpleNamespace(monotonic=made))
    monkeypatch.setattr(step_watch.marks, "take", list)
    return made


def watched(recorder: Any) -> StepWatch:
    session = Session()
    session.recorder = recorder
    return StepWatch(cast(Any, SimpleNamespace(session=session)))


def exchanged(launch: float, end: float, name: str = "SGD.0") -> Finished:
    times = BucketTimes(4000, 4000, None, launch, launch, launch, end)
    return Finished(name, FACTS, Exchange((launch,), launch, end, 4000, (times,)))


def phases(row: StepRow) -> list[tuple[str, float]]:
    return [(phase.name, round(phase.end_seconds - phase.begin_seconds, 6)) for phase in row.phases]


def test_a_batch_with_marks_is_a_step_of_known_phases(clock: Clock) -> None:
    recorder = Rows()
    watch = watched(recorder)
    watch.expect_exchanges()
    watch.epoch_begins(1, 5, 3)
    clock.now = 101.0
    watch.batch_begins(0)
    watch.batch_begins(0)  # the second callback of ours
    watch.exchanged(exchanged(103.0, 103.5))
    step_watch.marks.take = lambda: [Mark(101.5, 102.0, 8)]
    clock.now = 104.0
    watch.batch_ends(0, 0.25)
    watch.batch_ends(0, 0.25)
    (row,) = recorder.rows
    assert phases(row) == [("data", 0.5), ("forward", 0.5), ("backward", 1.0), ("optimizer", 0.5)]
    assert (row.samples, row.loss, row.total_steps) == (8, 0.25, 10)
    assert [exchange.sent_bytes for exchange in row.exchanges] == [4000]
    assert row.end_seconds == 104.0


@pytest.mark.parametrize(
    ("mark", "expected"),
    [
        (None, [("undivided", 2.0)]),
        (Mark(None, 102.0), [("undivided", 1.0), ("backward", 1.0)]),
        (Mark(101.5, 103.2, 8), [("undivided", 2.0)]),  # a loss that was known after the gradients: no boundary
        (Mark(100.5, 102.0, 8), [("undivided", 2.0)]),  # of a batch before this one
        (Mark(101.5, None, 8), [("data", 0.5), ("computing", 1.5)]),
    ],
)
def test_what_no_mark_parts_is_not_parted(mark: Mark | None, expected: list[Any], clock: Clock) -> None:
    recorder = Rows()
    watch = watched(recorder)
    clock.now = 101.0
    watch.batch_begins(0)
    watch.exchanged(exchanged(103.0, 103.5))
    step_watch.marks.take = lambda: [] if mark is None else [mark]
    clock.now = 104.0
    watch.batch_ends(0, None)
    (row,) = recorder.rows
    assert phases(row) == [*expected, ("optimizer", 0.5)]


def test_several_steps_of_one_call(clock: Clock) -> None:
    recorder = Rows()
    watch = watched(recorder)
    watch.batch_begins(4)
    watch.exchanged(exchanged(101.0, 102.0))
    watch.exchanged(exchanged(104.0, 105.0))
    step_watch.marks.take = lambda: [Mark(100.25, 100.5, 8), Mark(103.0, 103.5, 7)]
    clock.now = 106.0
    watch.batch_ends(5, 1.0)
    first, second = recorder.rows
    assert phases(first) == [("data", 0.25), ("forward", 0.25), ("backward", 0.5)]
    # Between two steps of one call the optimizer steps, and the data are waited for.
    assert phases(second) == [
        ("undivided", 1.0), ("data", 0.0), ("forward", 0.5), ("backward", 0.5), ("optimizer", 1.0),
    ]  # fmt: skip
    assert (first.end_seconds, second.end_seconds) == (102.0, 106.0)
    assert (first.samples, second.samples) == (8, 7)
    assert [len(row.exchanges) for row in recorder.rows] == [1, 1]
    # The data have ended: two steps of three. The second batch was there before the first step was over.
    watch.batch_begins(6)
    watch.exchanged(exchanged(107.0, 108.0))
    watch.exchanged(exchanged(110.0, 111.0))
    step_watch.marks.take = lambda: [Mark(106.25, 106.5, 8), Mark(107.0, 109.0, 7)]
    clock.now = 112.0
    watch.batch_ends(8, 1.0)
    assert phases(recorder.rows[-1]) == [("data", 0.0), ("computing", 1.0), ("backward", 1.0), ("optimizer", 1.0)]
    assert len(recorder.rows) == 4


def test_what_comes_before_the_batch_is_no_wait_for_data(clock: Clock) -> None:
    recorder = Rows()
    watch = watched(recorder)
    watch.expect_exchanges()
    watch.batch_begins(7)  # the data have ended: there is no such batch
    for number, traces in enumerate((True, False, True)):
        clock.now = 101.0 + 4 * number
        watch.batch_begins(number)
        clock.now += 0.25  # callbacks of others
        watch.batch_is_asked()
        if traces:
            watch.traces()
        begin = clock.now
        asked = begin + 0.375 if number == 2 else None
        mark = Mark(begin + 0.5, begin + 1, 8, asked)
        step_watch.marks.take = lambda mark=mark: [mark]  # type: ignore[misc]
        watch.exchanged(exchanged(begin + 1.5, begin + 2))
        clock.now = begin + 2
        watch.batch_ends(number, 1.0)
    first, second, third = recorder.rows
    assert phases(first) == [("undivided", 1.25), ("backward", 0.5)]
    assert phases(second) == [("data", 0.5), ("forward", 0.5), ("backward", 0.5)]
    assert second.phases[0].begin_seconds == 105.25
    assert phases(third)[:2] == [("data", 0.125), ("forward", 0.5)], "its graph tells when it asks for the batch"
    assert (first.samples, second.samples) == (8, 8)


def test_outside_graphs(clock: Clock) -> None:
    recorder = Rows()
    watch = watched(recorder)
    watch.batch_begins(0)
    clock.now += 1
    watch.batch_is_there(8)
    clock.now += 1
    watch.loss_is_known(had_batch=False)
    clock.now += 1
    watch.optimizer_is_done()
    watch.batch_ends(0, 1.0)
    watch.batch_begins(1)
    clock.now += 1
    watch.batch_is_there(7)
    clock.now += 1
    watch.batch_ends(1, 1.0)
    first, second = recorder.rows
    assert phases(first) == [("data", 1.0), ("forward", 1.0), ("computing", 1.0)]
    assert phases(second) == [("data", 1.0), ("computing", 1.0)]
    assert (first.samples, second.samples) == (8, 7)


def test_several_steps_of_one_call_of_one_rank(clock: Clock) -> None:
    recorder = Rows()
    watch = watched(recorder)
    for number, there in enumerate((2.0, 3.0)):  # before and after the loss of the batch before
        begin = clock.now
        watch.batch_begins(2 * number)
        step_watch.marks.take = lambda begin=begin, there=there: [  # type: ignore[misc]
            Mark(begin + 1, begin + 2.5, 8), Mark(begin + there, begin + 4, 8)
        ]  # fmt: skip
        clock.now += 5
        watch.batch_ends(2 * number + 1, 1.0)
    first, second = recorder.rows
    assert phases(first) == [("data", 1.0), ("forward", 1.5), ("computing", 2.5)]
    assert phases(second) == [("data", 1.0), ("forward", 1.5), ("undivided", 2.5)]
    assert first.samples == 16


def test_passes_without_an_exchange_are_part_of_a_step(clock: Clock) -> None:
    recorder = Rows()
    watch = watched(recorder)
    watch.expect_exchanges()
    for number in range(4):
        clock.now += 1
        watch.batch_begins(number)
        if number % 2:
            watch.exchanged(exchanged(clock.now + 0.5, clock.now + 0.6))
        clock.now += 1
        watch.batch_ends(number, 1.0)
    assert len(recorder.rows) == 2
    assert phases(recorder.rows[1]) == [("undivided", 1.0), ("undivided", 0.5), ("optimizer", 0.4)]


def test_one_rank_steps_with_every_batch(clock: Clock) -> None:
    recorder = Rows()
    watch = watched(recorder)
    for number in range(2):
        watch.batch_begins(number)
        step_watch.marks.take = lambda: [Mark(clock.now - 1.5, clock.now - 1, 8)]
        clock.now += 2
        watch.batch_ends(number, 1.0)
    assert len(recorder.rows) == 2
    assert phases(recorder.rows[1]) == [("data", 0.5), ("forward", 0.5), ("computing", 1.0)]


def test_pauses(clock: Clock) -> None:
    recorder = Rows()
    watch = watched(recorder)
    watch.epoch_begins(0, None, 2)
    clock.now = 101.0
    watch.evaluation_begins()
    watch.evaluation_begins()
    clock.now = 102.0
    watch.evaluation_ends()
    watch.epoch_ends()
    clock.now = 102.5
    watch.epoch_begins(1, None, 2)
    watch.batch_begins(0)
    clock.now = 103.0
    watch.batch_ends(0, None)
    (row,) = recorder.rows
    assert phases(row) == [("evaluation", 1.0), ("end of epoch", 0.5), ("undivided", 0.5)]
    watch.train_ends()
    assert open_phases(watch._here) == ["between trainings"], "no step is expected"
    watch.train_begins()
    assert not open_phases(watch._here)


def test_a_loop_without_callbacks_steps_with_each_round(clock: Clock) -> None:
    recorder = Rows()
    watch = watched(recorder)
    for begin in (101.0, 103.0):
        watch.exchanged(exchanged(begin + 1.0, begin + 1.5, "tape"))
        watch.exchanged(exchanged(begin + 1.6, begin + 1.7, "tape+1"))
    first, second = recorder.rows
    assert phases(first) == [("undivided", 2.0)]
    assert phases(second) == [("undivided", 1.5)]
    assert [len(row.exchanges) for row in recorder.rows] == [1, 2]
    assert second.end_seconds == 104.5


def test_buckets_arrive_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Finished] = []
    watch = SimpleNamespace(exchanged=told.append, expect_exchanges=lambda: None)
    monkeypatch.setattr(step_watch, "step_watch", lambda front_end: watch)
    one = Round("SGD.0", one_by_one=False, front_end="tensorflow")
    parts = [one.add(nbytes, codec, (name,)) for nbytes, codec, name in ((80, "auto", "b"), (40, "none", "a"))]
    one.all_added()
    for _ in range(2):
        one.submitted(1, 2.0)
        one.submitted(0, 1.0)
        one.arrived(1, Travel(2.5, 3.0, 40))
        assert parts[0].place == 0
        one.arrived(0, Travel(1.5, 4.0, 80, 0.5, 0.25, 2, "int8"))
    assert len(told) == 2
    assert [facts.codec for facts in told[0].facts] == ["int8", "none"], "what was chosen, not that it was"
    exchange = told[0].exchange
    assert (exchange.wait_begin_seconds, exchange.wait_end_seconds, exchange.sent_bytes) == (2.0, 4.0, 120)
    assert [bucket.launch_seconds for bucket in exchange.buckets] == [1.0, 2.0], "in the order of all ranks"
    assert exchange.buckets[0].rounds == 2
    # An operation that failed leaves a round open; the next one is whole.
    one.submitted(0, 5.0)
    one.submitted(0, 6.0)
    one.submitted(1, 6.0)
    one.arrived(1, Travel(6.0, 7.0, 40))
    one.arrived(0, Travel(6.0, 8.0, 80))
    assert len(told) == 3
    assert told[2].exchange.buckets[0].launch_seconds == 6.0


def test_operations_one_by_one_are_one_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Finished] = []
    watch = SimpleNamespace(exchanged=told.append, expect_exchanges=lambda: None)
    monkeypatch.setattr(step_watch, "step_watch", lambda front_end: watch)
    one = Round("tape", one_by_one=True, front_end="tensorflow")
    for place, at in enumerate((1.0, 2.0)):
        one.add(40, "none", (str(place),))
        one.submitted(place, at)
        one.arrived(place, Travel(at, at + 0.75, 40))
    assert not told, "more may be added"
    one.all_added()
    (finished,) = told
    assert len(finished.exchange.buckets) == len(finished.facts) == 1
    assert finished.facts[0].parameters == ("0", "1")
    assert (finished.exchange.wait_begin_seconds, finished.exchange.wait_end_seconds) == (1.0, 2.75)
    assert finished.exchange.sent_bytes == 80


def test_a_recorder_that_fails_says_so_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step_watch, "_quiet", step_watch._Quiet())

    def fails(front_end: str = "") -> None:
        raise KeyError("nothing")

    monkeypatch.setattr(step_watch, "step_watch", fails)
    for _ in range(3):
        step_watch.tell(lambda watch: watch.train_begins())
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["farandole: warning: steps are recorded no more: KeyError: 'nothing'"]


def train(folder: Path, clock: Clock, *, data: float, forward: float, marks: bool = True) -> None:
    """Write two ranks' records of 40 batches in which they wait for data and compute so long."""
    for rank in range(2):
        clock.now = 100.0
        writer = StepRecorder([EventWriter(folder, rank)])
        writer.record(Started(rank, 2, "a", 1 + rank, 0, 100.0, "", "clock"))
        watch = watched(writer)
        watch.note_front_end("keras on tensorflow")
        for number in range(40):
            clock.now += 0.0005
            begin = clock.now
            watch.batch_begins(number)
            left = begin + data + 2 * forward
            watch.exchanged(exchanged(left, left + 0.001))
            found = [Mark(begin + data, begin + data + forward, 8)] if marks else []
            step_watch.marks.take = lambda found=found: found  # type: ignore[misc]
            clock.now = left + 0.003
            watch.batch_ends(number, 1.0)
        writer.close()


def test_the_verdict_of_a_training_that_waits_for_data(tmp_path: Path, clock: Clock) -> None:
    train(tmp_path, clock, data=0.05, forward=0.005)
    found = diagnose(tmp_path)
    assert found.bound == "input"
    text = to_text(found)
    assert "tf.data" in text
    for strange in ("DataLoader", "fd.shard", "torch"):
        assert strange not in text, text
    assert not any(NOT_DIVIDED in note for note in found.notes)
    summary = summarise(tmp_path)
    assert summary.shares is not None
    assert summary.shares["data"] == pytest.approx(0.05 / 0.0635, abs=0.01)
    assert summary.sent_bytes_per_step == 4000


def test_no_verdict_where_data_and_computing_are_not_told_apart(tmp_path: Path, clock: Clock) -> None:
    train(tmp_path, clock, data=0.05, forward=0.005, marks=False)
    found = diagnose(tmp_path)
    assert found.bound == "unknown"
    assert "Compute-bound" not in found.verdict
    assert "not told apart" in found.verdict
    assert NOT_DIVIDED in found.notes
    summary = summarise(tmp_path)
    assert summary.shares is not None
    assert summary.shares["data"] is None
    assert NOT_DIVIDED in summary.notes


def test_rows_are_read_as_they_were_written(tmp_path: Path, clock: Clock) -> None:
    train(tmp_path, clock, data=0.01, forward=0.005)
    timeline = read_events(tmp_path / "events-rank0.jsonl")
    assert timeline.step_count == 40
    assert timeline.setup[events.SETUP_FRONT_END] == "keras on tensorflow"
    assert [phase.name for phase in timeline.steps[3].phases] == ["data", "forward", "backward", "optimizer"]
    assert isinstance(timeline.steps[3].phases[0], Phase)
