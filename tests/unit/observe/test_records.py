"""Records of version 2: every field comes back, files stay below their bound, version 1 is still read."""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.core.host import process_status
from farandole.core.vocabulary.events import (
    BACKWARD,
    DATA,
    EVALUATION,
    EXCHANGE,
    FORWARD,
    GARBAGE_COLLECTION,
    OTHER,
    BucketFacts,
    BucketLayout,
    BucketTimes,
    ClockOffset,
    DataWait,
    DevicePhases,
    Exchange,
    InnerExchange,
    LinkTraffic,
    Logged,
    Phase,
    Sample,
    Setup,
    Started,
    StepDone,
    Traffic,
)
from farandole.observe.figures.summary import summarise
from farandole.observe.records import host_sampler, timeline_reader
from farandole.observe.records import host_sampler as other_work
from farandole.observe.records.host_sampler import HostSampling
from farandole.observe.records.rows import StepRow, divide, step_seconds
from farandole.observe.records.step_recorder import (
    EXCHANGES_KEPT,
    PHASES_KEPT,
    EventWriter,
    StepBuilder,
    StepRecorder,
)
from farandole.observe.records.timeline_reader import MOST_LINKS, RankTraffic, read_events

STARTED = Started(0, 2, "h", 1, 0, 100.0, "", "clock")


def bucket(at: float) -> BucketTimes:
    return BucketTimes(4096, 2048, at, at + 0.001, at + 0.002, at + 0.003, at + 0.01, 0.004, 0.002, 3)


def write_step(
    writer: StepRecorder, step: int, seconds: float = 0.1, buckets: int = 2, after: float = 0.0
) -> None:
    at = 100.0 + (step - 1) * 0.1 + after
    writer.record(DataWait(at, at + 0.01, 4))
    writer.record(Phase(FORWARD, at + 0.01, at + 0.03))
    writer.record(Phase(BACKWARD, at + 0.03, at + 0.06))
    times = tuple(bucket(at + 0.03 + 0.0001 * i) for i in range(buckets))
    launches = tuple(each.launch_seconds for each in times)
    writer.record(Exchange(launches, at + 0.06, at + 0.07, 4096, times, 1))
    writer.record(Logged(2.5, 100, 1000))
    writer.record(StepDone(step, at + seconds))


def test_everything_that_is_written_is_read(tmp_path: Path) -> None:
    writer = StepRecorder([EventWriter(tmp_path, 0)])
    layout = BucketLayout(
        "flat", (BucketFacts(4096, "int8:64", ("a.weight", 'b"\n')), BucketFacts(8, "none", ())), 1
    )
    sample = Sample(100.05, 1.0, 0.9, 0.5, 2, 10**9, 10**10, 0, 1, 2, 10**6, 10**7, 0.25, 5, 6)
    clock = ClockOffset(100.0, -86400.1234567, 0.0000123)
    late = DevicePhases(1, (Phase(FORWARD, 100.011, 100.032),))
    writer.record(STARTED)
    writer.record(clock)
    writer.record(layout)
    write_step(writer, 1)
    writer.record(sample)
    writer.record(Sample(101.0, 1.0))
    for _ in range(2):
        writer.record(Traffic(101.5, 2.0, (LinkTraffic("10.0.0.1", "fe80::2", 10**9, 1.234567),)))
    writer.record(late)
    write_step(writer, 2)
    writer.close()
    timeline = read_events(tmp_path / "events-rank0.jsonl")
    assert (timeline.started, timeline.skipped) == (STARTED, [])
    assert timeline.samples == [sample, Sample(101.0, 1.0)]
    assert timeline.clock_offsets == [clock]
    assert timeline.traffic == RankTraffic({("10.0.0.1", "fe80::2"): (2 * 10**9, 2.469134)}, 4.0)
    assert timeline.layouts == [(1, layout)]
    assert timeline.device_phases[1][0].begin_seconds == pytest.approx(100.011, abs=2e-6)
    second = timeline.steps[1]
    assert (second.step, second.samples, second.loss, second.tokens, second.total_steps) == (2, 4, 2.5, 100, 1000)
    assert [phase.name for phase in second.phases] == [DATA, FORWARD, BACKWARD]
    (exchange,) = second.exchanges
    assert exchange.engine == 1
    want = bucket(100.13)
    for name in BucketTimes.__dataclass_fields__:
        assert getattr(exchange.buckets[0], name) == pytest.approx(getattr(want, name), abs=2e-6), name
    assert second.data_seconds == pytest.approx(0.01, abs=2e-6)
    records = timeline_reader._lines(tmp_path / "events-rank0.jsonl", lambda _: True)
    assert [type(record).__name__ for record in records] == [
        "Started", "ClockOffset", "BucketLayout", "StepRow", "Sample", "Sample", "Traffic", "Traffic",
        "DevicePhases", "StepRow",
    ]  # fmt: skip


def test_links_are_bounded() -> None:
    traffic = RankTraffic()
    for number in range(MOST_LINKS + 10):
        traffic.add(Traffic(1.0, 2.0, (LinkTraffic("a", str(number), 5, 0.5),)))
    traffic.add(Traffic(1.0, 2.0, (LinkTraffic("a", "7", 5, 0.5),)))
    assert len(traffic.sums) == MOST_LINKS
    assert traffic.sums["a", "7"] == (10, 1.0)


VERSION_1 = (
    '{"version": 1, "rank": 0, "size": 1, "host": "h", "process_id": 1, "generation": 0, "begin_seconds": 1.0, '
    '"wall_time": ""}\n'
    '{"step": 1, "begin_seconds": 1.0, "end_seconds": 2.0, "data_seconds": 0.25, "samples": 4, "exchanges": '
    '[{"launch_seconds": [1.4], "wait_begin_seconds": 1.5, "wait_end_seconds": 1.75, "sent_bytes": 8}], '
    '"loss": 2.0}\n'
)


def test_version_1_is_read(tmp_path: Path) -> None:
    path = tmp_path / "events-rank0.jsonl"
    path.write_text(VERSION_1)
    timeline = read_events(path)
    assert (timeline.skipped, timeline.started.clock) == ([], "")
    assert step_seconds(timeline.steps[0]) == {DATA: 0.25, EXCHANGE: 0.25, OTHER: 0.5}


@pytest.mark.parametrize(
    "line",
    [
        '{"step":1,"begin":1,"us":NaN,"samples":1,"phases":[],"exchanges":[]}',
        '{"step":1,"begin":1,"us":1,"samples":1,"phases":[["a",1]],"exchanges":[]}',
        '{"step":1,"begin":1,"us":1,"samples":1,"phases":[[1,1,1]],"exchanges":[]}',
        '{"step":1,"begin":1,"us":1,"samples":1,"phases":[],"exchanges":[{"wait":[1],"sent":1}]}',
        '{"step":1,"begin":1,"us":1,"samples":1,"phases":[],"exchanges":[{"wait":[1,2],"sent":1,"buckets":[[1]]}]}',
        '{"sample":[]}', '{"sample":[1,"x"]}', '{"clock":[1,2]}', '{"thinned":[1,2]}', '{"device":1}',
        '{"buckets":[[1]]}', '{"traffic":1,"ways":[]}', '{"traffic":[1,2],"ways":[["a","b",1]]}',
        '{"traffic":[1,2],"ways":[["a","b",1.5,1]]}', '{"traffic":[1,2]}',
        '{"nothing":1}', "[]", "7", "null", "[" * 10000,
    ],
)  # fmt: skip
def test_damaged_lines_are_counted(tmp_path: Path, line: str) -> None:
    path = tmp_path / "events-rank0.jsonl"
    writer = StepRecorder([EventWriter(tmp_path, 0)])
    writer.record(STARTED)
    write_step(writer, 1)
    writer.close()
    path.write_text(path.read_text() + line + "\n")
    timeline = read_events(path)
    assert len(timeline.steps) == 1
    assert len(timeline.skipped) == 1
    assert timeline.skipped[0].startswith("events-rank0.jsonl:3: ")


@pytest.mark.full("further")
def test_a_long_run_stays_below_the_bound(tmp_path: Path) -> None:
    bound = 100_000
    writer = StepRecorder([EventWriter(tmp_path, 0, bound_bytes=bound)])
    writer.record(STARTED)
    steps = 20_000
    for step in range(1, steps + 1):
        write_step(writer, step, 0.2 if step == 13_007 else 0.1, 1, after=0.1 * (step > 13_007))
        writer.record(Sample(float(step), 1.0))
    writer.close()
    path = tmp_path / "events-rank0.jsonl"
    assert 0.5 * bound < path.stat().st_size < 1.01 * bound
    timeline = read_events(path)
    assert timeline.skipped == []
    assert timeline.step_count == steps
    assert (timeline.steps[0].step, timeline.steps[100].step) == (1, 101)
    thin = [row.step for row in timeline.steps if row.step > timeline.thinned[0].first_step]
    assert len(thin) > 20
    assert all(step % 10 == 0 for step in thin)
    # The rows and the sums in between cover every step once.
    covered = [(row.step, row.step) for row in timeline.steps]
    covered = sorted(covered + [(row.first_step, row.last_step) for row in timeline.thinned])
    assert covered[0][0] == 1
    assert covered[-1][1] == steps
    assert all(before[1] + 1 == after[0] for before, after in itertools.pairwise(covered))
    for row in timeline.thinned:
        assert sum(row.seconds.values()) == pytest.approx(
            row.end_seconds - row.begin_seconds, abs=1e-3 * row.steps
        )
        assert (row.samples, row.tokens, row.sent_bytes) == (4 * row.steps, 100 * row.steps, 4096 * row.steps)
    assert 13_007 in {row.slowest_step for row in timeline.thinned}
    assert 100 < len(timeline.samples) < 5000
    summary = summarise(tmp_path)
    assert (summary.steps, summary.samples) == (steps, 4 * steps)
    assert summary.samples_per_second == pytest.approx(4 / 0.1, rel=0.01)
    assert summary.sent_bytes_per_step == pytest.approx(4096)


def test_stepped_parameters_that_arrive_in_an_evaluation_are_counted() -> None:
    builder = StepBuilder()
    builder.take(STARTED)
    for degree in ("shard", "tensor"):
        builder.take(InnerExchange(degree, 100.1, 100.2, 1000))
    builder.take(Phase(EVALUATION, 100.0, 100.5))
    row = builder.take(StepDone(1, 101.0))
    assert row is not None
    assert row.inner_bytes == 1000, "what an evaluation itself exchanges is no part of training"


def test_samples_that_the_loop_tells_hold() -> None:
    """They are of its batches; a loader's may be of more (drawn ahead) or of none."""
    builder, found = StepBuilder(), []
    builder.take(STARTED)
    for step, told in ((1, [3, 4]), (2, []), (3, [0])):
        builder.take(DataWait(100.0, 100.1, 5))
        for samples in told:
            builder.take(Logged(batch_samples=samples))
        builder.take(Logged(samples=2))
        row = builder.take(StepDone(step, 100.0 + step))
        assert row is not None
        found.append(row.samples)
    assert found == [7, 7, 0], "what front ends count adds up"


def test_a_step_of_any_number_of_events_is_bounded() -> None:
    builder = StepBuilder()
    builder.take(STARTED)
    for i in range(5000):
        at = 100.0 + i * 0.001
        builder.take(Phase(FORWARD, at, at + 0.0005))
        builder.take(Phase(f"mine {i}", at, at))
        builder.take(Exchange((at,), at + 0.0005, at + 0.001, 10))
    row = builder.take(StepDone(1, 105.0))
    assert row is not None
    assert (len(row.phases), len(row.exchanges)) == (PHASES_KEPT, EXCHANGES_KEPT)
    assert len(row.more_seconds) <= PHASES_KEPT + 2
    assert sum(exchange.sent_bytes for exchange in row.exchanges) == 50_000
    seconds = step_seconds(row)
    assert sum(seconds.values()) == pytest.approx(5.0)
    assert seconds[FORWARD] == pytest.approx(2.5, rel=0.01)
    assert seconds[EXCHANGE] == pytest.approx(2.5, rel=0.01)


def test_the_innermost_phase_has_the_time() -> None:
    phases = [Phase("evaluation", 1.0, 5.0), Phase(FORWARD, 2.0, 4.0), Phase(GARBAGE_COLLECTION, 3.0, 3.5)]
    random.Random(0).shuffle(phases)
    assert divide(phases, 0.0, 6.0) == {OTHER: 2.0, "evaluation": 2.0, FORWARD: 1.5, GARBAGE_COLLECTION: 0.5}
    assert divide([Phase("a", -9.0, 9.0)], 0.0, 6.0) == {OTHER: 0.0, "a": 6.0}
    assert divide([Phase("a", 7.0, 9.0)], 0.0, 6.0) == {OTHER: 6.0}


times = st.floats(-5, 15, allow_nan=False)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from("abc"), times, times), max_size=12))
def test_parts_add_up_whatever_the_phases_are(raw: list[tuple[str, float, float]]) -> None:
    phases = [Phase(name, min(a, b), max(a, b)) for name, a, b in raw]
    parts = divide(phases, 0.0, 10.0)
    assert all(value >= 0 for value in parts.values())
    assert math.isclose(sum(parts.values()), 10.0, abs_tol=1e-9)


def test_a_system_without_counters_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_sampler, "_PROC", tmp_path)
    monkeypatch.setattr(process_status, "_PROC", tmp_path)
    taken: list[Any] = []
    sampling = HostSampling(taken.append, every_seconds=0.0)
    sampling.record(StepDone(1, 1e12))
    sampling.close()
    (sample,) = taken
    assert sample.process_cores is not None
    assert sample.peak_bytes is None
    unknown = (sample.machine_share, sample.resident_bytes, sample.available_bytes, sample.swapped_bytes)
    assert {*unknown, sample.network_sent_bytes, sample.gpu_share} == {None}


def test_samples_are_taken_when_due_and_see_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc = tmp_path
    (proc / "self" / "net").mkdir(parents=True)
    for module in (host_sampler, process_status):
        monkeypatch.setattr(module, "_PROC", proc)
    monkeypatch.setattr(host_sampler, "_INTERFACES", proc)
    (proc / "eth0" / "device").mkdir(parents=True)
    (proc / "eth0" / "speed").write_text("25000\n")

    def write(busy: int, idle: int, swap: int, sent: int) -> None:
        (proc / "stat").write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 1 1 1\n")
        (proc / "vmstat").write_text(f"nr_free 1\npswpin {swap}\npswpout 0\n")
        (proc / "self" / "net" / "dev").write_text(
            f"Inter-|   Receive\n face |bytes\n lo: 9 9 9 9 9 9 9 9 9 9 9 9 9 9 9 9\n"
            f"eth0: {2 * sent} 0 0 0 0 0 0 0 {sent} 0 0 0 0 0 0 0\n"
        )

    taken: list[Any] = []
    write(100, 100, 0, 1000)
    sampling = HostSampling(taken.append, every_seconds=5.0)
    sampling.record(StepDone(1, sampling._before.at_seconds + 4.9))
    assert taken == []
    write(175, 125, 2, 1500)
    sampling.record(StepDone(2, sampling._before.at_seconds + 5.0))
    (sample,) = taken
    assert sample.machine_share == 0.75
    assert sample.swapped_bytes == 2 * 4096
    assert (sample.network_sent_bytes, sample.network_received_bytes) == (500, 1000)
    assert sample.link_bits_per_second == 25e9


def test_another_thread_that_computes_is_told_of_once_with_its_place() -> None:
    taken: list[Any] = []
    ends = threading.Event()

    def hog() -> None:
        while not ends.is_set():
            sum(range(1000))

    sampling = HostSampling(taken.append, every_seconds=0.0)
    thread = threading.Thread(target=hog)
    thread.start()
    try:
        for _ in range(2):
            used, at = time.process_time(), sampling._before.at_seconds
            while time.process_time() < used + 0.2:
                time.sleep(0.01)
            sampling.record(StepDone(1, at + 1.0))
    finally:
        ends.set()
        thread.join()
    places = [event.values for event in taken if isinstance(event, Setup)]
    assert [list(each) for each in places] == [["busy_thread"]]
    assert str(places[0]["busy_thread"]).startswith("hog at test_records.py:")
    shares = [event.thread_cores for event in taken if isinstance(event, Sample)]
    assert all(share is not None and share > 0.1 for share in shares), shares


def test_a_child_that_has_ended_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or its whole time would count as of one second when it is seen again."""
    (tmp_path / "7").mkdir()
    monkeypatch.setattr(other_work, "_TASKS", tmp_path)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        (tmp_path / "7" / "children").write_text(f"999999999 {child.pid} ")
        assert list(other_work.children_seconds()) == [child.pid]


def test_what_a_child_computes_is_counted() -> None:
    taken: list[Any] = []
    sampling = HostSampling(taken.append, every_seconds=0.0)
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and other_work.children_seconds().get(child.pid, 0.0) < 0.3:
            time.sleep(0.02)
        sampling.record(StepDone(1, sampling._before.at_seconds + 1.0))
    finally:
        child.kill()
        child.wait()
    (sample,) = (event for event in taken if isinstance(event, Sample))
    assert sample.children_cores is not None
    assert sample.children_cores * sample.span_seconds >= 0.25


def test_the_speed_of_a_link_is_that_of_hardware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_sampler, "_INTERFACES", tmp_path)
    for name, speed, hardware in (("eth0", "1000", True), ("veth0", "10000", False), ("ens3", "-1", True)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "speed").write_text(speed + "\n")
        if hardware:
            (tmp_path / name / "device").mkdir()
    speeds = [host_sampler._speed(name) for name in ("eth0", "veth0", "ens3", "none")]
    assert speeds == [1e9, None, None, None]


def test_rows_are_small(tmp_path: Path) -> None:
    writer = StepRecorder([EventWriter(tmp_path, 0)])
    writer.record(STARTED)
    write_step(writer, 1, buckets=30)
    writer.close()
    line = (tmp_path / "events-rank0.jsonl").read_text().splitlines()[1]
    assert len(line) < 2500
    assert isinstance(read_events(tmp_path / "events-rank0.jsonl").steps[0], StepRow)
    assert json.loads(line)["step"] == 1
