"""The timeline of named operations: its structure, whole at any time, cheap, and bounded."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.core.vocabulary.errors import ConfigError
from farandole.horovod.named_ops.operations import OperationLog
from farandole.observe.export import operation_timeline
from farandole.observe.export.operation_timeline import (
    GATHER_SECONDS,
    OperationEvents,
    OperationTimeline,
    timeline_path,
)
from farandole.observe.export.trace_file import TraceFile, read_trace
from tests import trace_format


@contextmanager
def timeline(path: Path, rank: int = 0, mark_cycles: bool = False) -> Iterator[OperationTimeline]:
    made = OperationTimeline(rank, 2)
    made.start(path, mark_cycles=mark_cycles)
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Hold the clock at 100 s, and let the test set it."""
    at = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: at[0])
    monkeypatch.setattr(time, "time_ns", lambda: 1_700_000_000_000_000_123)
    return lambda now: at.__setitem__(0, now)


def allreduce(log: OperationLog, name: str, begin: float, shape: tuple[int, ...] = (64, 3, 7, 7)) -> None:
    log.submitted(name, "allreduce", begin)
    log.rank_ready(name, 0, begin)
    log.rank_ready(name, 1, begin + 0.001)
    log.begun(name, "allreduce", begin + 0.002)
    log.activity([name], "MEMCPY_IN_FUSION_BUFFER", begin + 0.002, begin + 0.003)
    log.activity([name], "TCP_ALLREDUCE", begin + 0.003, begin + 0.005)
    log.finished(name, "float32", shape, begin + 0.006)


def test_the_structure_is_exactly_that_which_viewers_of_horovods_timeline_know(
    tmp_path: Path, clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "ada")
    path = tmp_path / "timeline.json"
    with timeline(path, mark_cycles=True) as log:
        allreduce(log, "allreduce.layer1.weight", 100.5)
    start = {"start_time_since_epoch_in_micros": 1_700_000_000_000_000}
    whose = {"name": "rank 0 of 2 on ada", "rank": 0, "size": 2, "host": "ada"}
    ended = {"dtype": "float32", "shape": "[64, 3, 7, 7]"}
    assert trace_format.check(path) == [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {**start, **whose}},
        {"name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}},
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "allreduce.layer1.weight"}},
        {"name": "process_sort_index", "ph": "M", "pid": 1, "args": {"sort_index": 1}},
        {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 500_000, "pid": 1},
        {"ph": "X", "name": "0", "ts": 500_000, "pid": 1, "dur": 0},
        {"ph": "X", "name": "1", "ts": 501_000, "pid": 1, "dur": 0},
        {"ph": "i", "name": "CYCLE_START", "ts": 502_000, "pid": 0, "s": "g"},
        {"ph": "E", "ts": 502_000, "pid": 1},
        {"ph": "B", "name": "ALLREDUCE", "ts": 502_000, "pid": 1},
        {"ph": "B", "name": "MEMCPY_IN_FUSION_BUFFER", "ts": 502_000, "pid": 1},
        {"ph": "E", "ts": 503_000, "pid": 1},
        {"ph": "B", "name": "TCP_ALLREDUCE", "ts": 503_000, "pid": 1},
        {"ph": "E", "ts": 505_000, "pid": 1},
        {"ph": "E", "ts": 506_000, "pid": 1, "args": ended},
    ]


@pytest.mark.parametrize(
    "kind", ["allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "join"]
)
def test_every_kind_is_negotiated_and_then_runs(tmp_path: Path, kind: Any) -> None:
    with timeline(tmp_path / "t.json") as log:
        log.submitted("x", kind, time.monotonic())
        log.begun("x", kind, time.monotonic())
        log.finished("x", "", (), time.monotonic())
    events = trace_format.lane(trace_format.check(tmp_path / "t.json"), "x")
    assert [event["name"] for event in events if event["ph"] == "B"] == [f"NEGOTIATE_{kind.upper()}", kind.upper()]
    assert "args" not in events[-1], "a barrier has no type and no shape"


def test_operations_that_travel_together_share_a_phase_and_a_cycle(tmp_path: Path) -> None:
    with timeline(tmp_path / "t.json", mark_cycles=True) as log:
        for _ in range(3):
            now = time.monotonic()
            for name in "ab":
                log.submitted(name, "allreduce", now)
            for name in "ab":
                log.begun(name, "allreduce", now)
            log.activity("ab", "TCP_ALLREDUCE", now, now + 0.001)
            for name in "ab":
                log.finished(name, "float32", (1,), now + 0.002)
    events = trace_format.check(tmp_path / "t.json")
    assert sum(event["name"] == "CYCLE_START" for event in events if "name" in event) == 3
    for name in "ab":
        assert sum(event.get("name") == "TCP_ALLREDUCE" for event in trace_format.lane(events, name)) == 3


def test_without_marks_there_are_no_cycles(tmp_path: Path) -> None:
    with timeline(tmp_path / "t.json") as log:
        allreduce(log, "a", time.monotonic())
    assert "CYCLE_START" not in (tmp_path / "t.json").read_text()


def test_an_operation_that_was_refused_is_an_error_and_the_next_one_of_that_name_is_not(tmp_path: Path) -> None:
    with timeline(tmp_path / "t.json") as log:
        now = time.monotonic()
        log.submitted("a", "allreduce", now)
        log.finished("a", "float32", (2,), now + 0.1, "rank 1 asked for int32")
        allreduce(log, "a", now + 0.2)
        log.submitted("b", "allreduce", now)
        log.begun("b", "allreduce", now)
        log.finished("b", "float32", (2,), now, "connection lost")
    events = trace_format.check(tmp_path / "t.json")
    refused = trace_format.lane(events, "a")
    assert [event.get("name") for event in refused[:4]] == ["NEGOTIATE_ALLREDUCE", None, "ERROR", None]
    assert refused[3]["args"] == {"dtype": "float32", "shape": "[2]", "error": "rank 1 asked for int32"}
    assert refused[5]["name"] == "0"
    broken = trace_format.lane(events, "b")
    assert "ERROR" not in [event.get("name") for event in broken], "it had begun: it ends where it broke"
    assert broken[-1]["args"]["error"] == "connection lost"


TIMES = st.floats(-1, 9)
CALLS = st.one_of(
    st.tuples(st.just("submitted"), st.sampled_from("ab"), st.just("allreduce"), TIMES),
    st.tuples(st.just("rank_ready"), st.sampled_from("ab"), st.integers(0, 3), TIMES),
    st.tuples(st.just("begun"), st.sampled_from("ab"), st.just("allreduce"), TIMES),
    st.tuples(st.just("activity"), st.sampled_from(["a", "ab"]), st.just("QUEUE"), TIMES, TIMES),
    st.tuples(
        st.just("finished"), st.sampled_from("ab"), st.just("float32"), st.just((1,)), TIMES,
        st.sampled_from(["", "broken"]),
    ),
)  # fmt: skip


@given(st.lists(CALLS, max_size=30))
def test_whatever_order_the_calls_come_in_the_trace_is_well_formed(calls: list[tuple[Any, ...]]) -> None:
    events = OperationEvents(0.0, mark_cycles=True)
    events.header(5, 0, 1, "ada")
    for method, *arguments in calls:
        getattr(events, method)(*arguments)
    path = Path(f"/dev/shm/farandole-trace-{os.getpid()}.json")
    try:
        file = TraceFile(path)
        file.write(events.take())
        file.close()
        trace_format.check(path, ended=False)
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize(
    "name",
    [
        'say "hi"',
        "line\nbreak",
        "back\\slash",
        "tab\tand \x00 null",
        "graue Straße 🐎",
        "\ud800 alone",
        "]",
        "x" * 9000,
    ],
)
def test_hostile_names_and_errors_come_back_as_they_were(tmp_path: Path, name: str) -> None:
    with timeline(tmp_path / "t.json") as log:
        log.submitted(name, "allreduce", time.monotonic())
        log.finished(name, "float32", (), time.monotonic(), name)
    events = trace_format.lane(trace_format.check(tmp_path / "t.json"), name)
    assert events[-1]["args"]["error"] == name


def test_the_file_is_valid_but_for_its_bracket_after_every_event(tmp_path: Path) -> None:
    """Across many pages, with events of all lengths up to more than a page."""
    events = [
        {"ph": "i", "name": "x" * (length % 97 + (5000 if length % 50 == 0 else 0))} for length in range(400)
    ]
    file = TraceFile(tmp_path / "t.json")
    for count, event in enumerate(events):
        assert not count or json.loads((tmp_path / "t.json").read_text() + "]") == events[:count]
        file.write([event])
    file.close()
    assert json.loads((tmp_path / "t.json").read_text()) == events


def test_a_write_stays_inside_a_page_unless_one_event_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[tuple[int, int]] = []
    write, path = os.write, tmp_path / "t.json"

    def watched(descriptor: int, data: bytes) -> int:
        offset = path.stat().st_size
        writes.append((offset, offset + len(data) - 1))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", watched)
    file = TraceFile(tmp_path / "t.json")
    file.write({"ph": "i", "name": str(number)} for number in range(2000))
    file.close()
    assert len(names_in(tmp_path / "t.json")) == 2000
    size = (tmp_path / "t.json").stat().st_size
    crossing = [write for write in writes if write[0] // 4096 != write[1] // 4096]
    assert len(crossing) <= size // 4096, "an event at the end of each page"
    assert len(writes) < 4 * (size // 4096), "whole pages, not an event a write"
    assert all(end - begin < 60 for begin, end in crossing), "a single event"


def names_in(path: Path) -> list[str]:
    return [event["name"] for event in json.loads(path.read_text())]


def test_events_are_in_the_file_within_a_tenth_of_a_second(tmp_path: Path) -> None:
    with timeline(tmp_path / "t.json", mark_cycles=True) as log:
        allreduce(log, "allreduce.test_allreduce", time.monotonic())
        deadline = time.monotonic() + 10
        while "TCP_ALLREDUCE" not in (tmp_path / "t.json").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        text = (tmp_path / "t.json").read_text()
    for word in ("allreduce.test_allreduce", "NEGOTIATE_ALLREDUCE", "ALLREDUCE", "CYCLE_START"):
        assert word in text
    assert GATHER_SECONDS <= 0.05


KILLED = """
import sys, time
from farandole.observe.export.operation_timeline import OperationTimeline
log = OperationTimeline(0, 2)
log.start(sys.argv[1])
print("ready", flush=True)
number = 0
while True:
    name = f"allreduce.layer{number % 50}.weight"
    log.submitted(name, "allreduce", time.monotonic())
    log.begun(name, "allreduce", time.monotonic())
    log.finished(name, "float32", (number,), time.monotonic())
    number += 1
    if number % 20 == 0:
        time.sleep(0.0005)
"""


def test_a_killed_process_leaves_a_whole_file(tmp_path: Path) -> None:
    for turn in range(4):
        path = tmp_path / f"{turn}.json"
        with subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.15 + 0.013 * turn)
            process.send_signal(signal.SIGKILL)
        assert len(trace_format.check(path, ended=False)) > 50


def test_many_events_from_many_threads_all_arrive(tmp_path: Path) -> None:
    def work(log: OperationTimeline, thread: int) -> None:
        for number in range(500):
            allreduce(log, f"allreduce.{thread}.{number % 10}", time.monotonic(), (number,))

    with timeline(tmp_path / "t.json") as log:
        threads = [threading.Thread(target=work, args=(log, thread)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    events = trace_format.check(tmp_path / "t.json")
    assert sum(event.get("name") == "TCP_ALLREDUCE" for event in events) == 2000
    assert "DROPPED" not in (tmp_path / "t.json").read_text()


def test_a_full_queue_loses_events_says_how_many_and_stays_well_formed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operation_timeline, "GATHER_SECONDS", 0.5)  # the writer sleeps while we fill the queue
    monkeypatch.setattr(operation_timeline, "QUEUE_LIMIT", 100)
    with timeline(tmp_path / "t.json") as log:
        for number in range(50):
            allreduce(log, f"a{number}", time.monotonic())
    events = trace_format.check(tmp_path / "t.json", ended=False)
    lost = [event for event in events if event.get("name") == "DROPPED_EVENTS"]
    assert [event["args"]["count"] for event in lost] == [50 * 7 - 100]


def test_the_calling_thread_only_queues_and_the_writer_sleeps_when_idle(tmp_path: Path) -> None:
    with timeline(tmp_path / "t.json") as log:
        time.sleep(0.1)
        clock_id = time.pthread_getcpuclockid(log._writer.ident)  # type: ignore[arg-type, union-attr]
        before = time.clock_gettime(clock_id)
        time.sleep(0.3)
        assert time.clock_gettime(clock_id) - before < 0.001
        now = time.monotonic()
        costs = []
        for _ in range(200):
            begin = time.thread_time()
            for _ in range(10):
                log.submitted("a", "allreduce", now)
            costs.append((time.thread_time() - begin) / 10)
    assert sorted(costs)[100] < 20e-6, "0.5 us on an idle machine"


def test_each_rank_has_its_file_and_it_is_private(tmp_path: Path) -> None:
    for rank in (0, 1):
        with timeline(tmp_path / "timeline.json", rank):
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["timeline.json", "timeline.rank1.json"]
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    assert timeline_path("a/b.tar.json", 2) == Path("a/b.tar.rank2.json")
    assert timeline_path("plain", 10) == Path("plain.rank10")


def test_a_new_timeline_replaces_the_old_one(tmp_path: Path) -> None:
    for name in ("first", "second"):
        with timeline(tmp_path / "t.json") as log:
            log.submitted(name, "allreduce", time.monotonic())
    assert list(trace_format.names(trace_format.check(tmp_path / "t.json", ended=False))) == ["second"]


@pytest.mark.parametrize("name", ["no/such/directory/t.json", "", "/", "nul\0byte.json", "."])
def test_a_path_that_cannot_be_written_is_a_clear_error(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for rank in (0, 1):
        with pytest.raises(ConfigError, match="timeline") as caught:
            OperationTimeline(rank, 2).start(name)
        assert caught.value.remedy
    assert not [thread for thread in threading.enumerate() if thread.name == "farandole-timeline"]


def test_a_full_disk_ends_the_timeline_whole_and_not_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write, path = os.write, tmp_path / "t.json"

    def full(descriptor: int, data: bytes) -> int:
        offset = path.stat().st_size
        if descriptor > 2 and offset + len(data) > 2000:
            if offset < 1990:
                return write(descriptor, data[: 2000 - offset])
            raise OSError(28, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    with timeline(tmp_path / "t.json") as log:
        for number in range(20):
            allreduce(log, f"a{number}", time.monotonic())
            time.sleep(0.005)
    trace_format.check(tmp_path / "t.json", ended=False)
    said = capsys.readouterr().err
    assert said.count("the timeline ends here") == 1
    assert "No space left on device" in said


def test_stop_twice_and_calls_after_it_change_nothing(tmp_path: Path) -> None:
    log = OperationTimeline(0, 1)
    log.start(tmp_path / "t.json")
    allreduce(log, "a", time.monotonic())
    log.stop()
    before = (tmp_path / "t.json").read_bytes()
    allreduce(log, "b", time.monotonic())
    log.stop()
    assert (tmp_path / "t.json").read_bytes() == before
    assert not [thread for thread in threading.enumerate() if thread.name == "farandole-timeline"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_does_not_touch_the_file(tmp_path: Path) -> None:
    with timeline(tmp_path / "t.json") as log:
        allreduce(log, "a", time.monotonic())
        child = os.fork()
        if child == 0:
            log.submitted("of the child", "allreduce", time.monotonic())
            log.stop()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        allreduce(log, "b", time.monotonic())
    events = trace_format.check(tmp_path / "t.json")
    assert list(trace_format.names(events)) == ["a", "b"]


@pytest.mark.parametrize("cut", range(1, 70, 3))
def test_a_file_that_was_cut_is_read_up_to_the_cut(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "t.json"
    events = [{"ph": "i", "name": f"event {number}", "ts": number} for number in range(5)]
    file = TraceFile(path)
    file.write(events)
    file.close()
    path.write_bytes(path.read_bytes()[:-cut])
    read = read_trace(path)
    assert read == events[: len(read)]
    assert len(read) >= 3
