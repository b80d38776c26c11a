"""One clock for all hosts: estimated within its bound, drift followed, timelines moved."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.core.vocabulary.events import ClockOffset, DataWait, Exchange, Phase, Started, StepDone
from farandole.observe.figures.step_parts import step_parts
from farandole.observe.records.clock import DRIFT, ClockTrack, Ping, common_clock, estimate
from farandole.observe.records.run_reader import read_run
from farandole.observe.records.step_recorder import EventWriter, StepRecorder

HOUR = 3600.0
delays = st.floats(1e-5, 0.5)


@given(st.lists(st.tuples(delays, delays), min_size=1, max_size=10), st.floats(-1e6, 1e6))
def test_the_offset_is_within_half_the_shortest_round_trip(ways: list[tuple[float, float]], true: float) -> None:
    """However unequal the two ways are."""
    pings, at = [], 50.0
    for there, back in ways:
        pings.append(Ping(at, at + there + true, at + there + back))
        at += 1.0
    offset = estimate(pings)
    assert offset.error_seconds == pytest.approx(min(there + back for there, back in ways) / 2)
    assert abs(offset.offset_seconds - true) <= offset.error_seconds + 1e-6


def test_all_the_asymmetry_on_one_way_reaches_the_bound() -> None:
    offset = estimate([Ping(10.0, 110.0, 10.2)])
    assert offset.offset_seconds == pytest.approx(99.9)
    assert offset.error_seconds == pytest.approx(0.1)


def test_drift_is_followed_between_and_beyond_measurements() -> None:
    def true(at: float) -> float:
        return HOUR + 1e-4 * at

    track = ClockTrack([ClockOffset(at, true(at), 1e-4) for at in (60.0, 0.0, 120.0)])
    for at in (0.0, 30.0, 61.0, 119.0, 150.0, -20.0):
        assert track.offset(at) == pytest.approx(true(at), abs=1e-9)
    assert track.error(60.0) == pytest.approx(1e-4)
    assert track.error(90.0) == pytest.approx(1e-4 + DRIFT * 30)
    one = ClockTrack([ClockOffset(5.0, 7.0, 0.1), ClockOffset(6.0, 7.05, 0.1)])
    assert one.offset(100.0) == 7.05  # two so near say nothing of drift


def write(directory: Path, rank: int, clock: str, ahead: float, drift: float, *, measured: bool = True) -> None:
    """Two hosts' ranks; on the true clock rank 1 launches 20 ms later than rank 0, which waits for it."""

    def own(true: float) -> float:
        return true + ahead + drift * (true - 100.0)

    writer = StepRecorder([EventWriter(directory, rank)])
    writer.record(Started(rank, 2, f"host{clock}", 1, 0, own(100.0), "", clock))
    for true in (100.0, 160.0, 220.0):
        if rank and measured:
            writer.record(ClockOffset(own(true), true - own(true), 1e-5))
    at = 100.0
    for step in range(1, 1001):
        late = 0.02 * rank
        writer.record(DataWait(own(at), own(at + 0.01), 1))
        writer.record(Phase("forward", own(at + 0.01), own(at + 0.03)))
        ready = at + 0.06 + late
        writer.record(Exchange((own(ready),), own(ready), own(at + 0.09), 10))
        writer.record(StepDone(step, own(at + 0.1)))
        at += 0.1
    writer.close()


def test_an_hour_and_a_drift_between_hosts_are_corrected(tmp_path: Path) -> None:
    write(tmp_path, 0, "a", 0.0, 0.0)
    write(tmp_path, 1, "b", HOUR, 1e-4)
    records = read_run(tmp_path)
    timelines = records.timelines
    assert records.notes == []
    assert not records.incomparable
    assert common_clock(timelines).incomparable == frozenset()
    for one, other in zip(timelines[0].steps, timelines[1].steps, strict=True):
        assert other.begin_seconds == pytest.approx(one.begin_seconds, abs=1e-5)
        assert other.exchanges[0].launch_seconds[0] - one.exchanges[0].launch_seconds[0] == pytest.approx(
            0.02, abs=1e-5
        )
        assert other.phases[0].begin_seconds == pytest.approx(one.phases[0].begin_seconds, abs=1e-5)
    first, second = step_parts(timelines)
    assert first[500].waiting == pytest.approx(0.02, abs=1e-4)
    assert second[500].waiting == pytest.approx(0.0, abs=1e-4)
    assert first[500].communication == pytest.approx(0.01, abs=1e-4)


def test_a_host_that_was_not_compared_is_named_and_its_times_are_not_mixed(tmp_path: Path) -> None:
    write(tmp_path, 0, "a", 0.0, 0.0)
    write(tmp_path, 1, "b", HOUR, 0.0, measured=False)
    records = read_run(tmp_path)
    assert len(records.notes) == 1
    assert "host hostb" in records.notes[0]
    assert records.incomparable == {1}
    first, _ = step_parts(records.timelines)
    # Who waits least tells what the network takes: 10 of the 30 ms that rank 0 waits.
    assert first[5].waiting == pytest.approx(0.02)
    assert first[5].communication == pytest.approx(0.01, abs=1e-5)


def test_without_rank_0_the_host_without_offsets_was_its_own(tmp_path: Path) -> None:
    write(tmp_path, 1, "b", HOUR, 0.0)
    (tmp_path / "run.json").write_text('{"size": 2}')
    records = read_run(tmp_path)
    assert len(records.notes) == 1
    assert "rank0" in records.notes[0]
    assert records.timelines[0].steps[0].begin_seconds == pytest.approx(
        100.0 + HOUR, abs=1e-5
    )  # alone it is as it was
