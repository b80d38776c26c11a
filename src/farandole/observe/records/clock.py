"""One clock for all hosts: offsets estimated from round trips, applied to timelines. Pure functions.

[Note: half the round trip] A host asks rank 0 for its time. The answer was given at some moment between asking and
hearing; assuming the middle, the offset is wrong by at most half the round trip, whatever part of it each way
took. The shortest of several round trips bounds it best. Between two measurements clocks drift apart evenly
(oscillators: below 100 microseconds a second), so the offset is interpolated.
"""

from __future__ import annotations

import bisect
import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...core.vocabulary.events import BucketTimes, ClockOffset, Phase, Sample
from .rows import ExchangeRow, StepRow, ThinnedRow
from .timeline_reader import RankTimeline

DRIFT = 1e-4
"""Seconds a second by which two clocks may drift apart: 100 parts in a million."""
_RANK_0 = "rank 0"
_SLOPE_SECONDS = 10.0
"""Two measurements nearer than this say nothing about drift."""


@dataclass(frozen=True)
class Ping:
    """One question about the time and its answer."""

    asked_seconds: float
    """On the own clock."""
    answered_seconds: float
    """On the reference's."""
    heard_seconds: float
    """On the own clock."""


def estimate(pings: Sequence[Ping]) -> ClockOffset:
    """Return the offset of the reference's clock from the shortest round trip. See [Note: half the round trip].

    >>> estimate([Ping(10.0, 3610.5, 11.0), Ping(20.0, 3620.1, 20.2)])
    ClockOffset(at_seconds=20.1, offset_seconds=3600.0, error_seconds=0.09999999999999964)
    """
    best = min(pings, key=lambda ping: ping.heard_seconds - ping.asked_seconds)
    middle = (best.asked_seconds + best.heard_seconds) / 2
    error = (best.heard_seconds - best.asked_seconds) / 2
    return ClockOffset(middle, best.answered_seconds - middle, error)


def are_comparable(timelines: Sequence[RankTimeline]) -> bool:
    """Return whether times of all these can be compared as they are: the one place that decides it.

    They have one clock, and it is what they say: exchanges end at about the same time on all ranks, within a step.
    """
    if len({_clock_of(timeline) for timeline in timelines}) > 1:
        return False
    by_step = [{row.step: row for row in timeline.steps if row.exchanges} for timeline in timelines]
    gaps, lengths = [], []
    for step in set.intersection(*map(set, by_step)) if len(by_step) > 1 else ():
        rows = [own[step] for own in by_step]
        ends = [row.exchanges[-1].wait_end_seconds for row in rows]
        gaps.append(max(ends) - min(ends))
        lengths.append(max(row.end_seconds - row.begin_seconds for row in rows))
    return not gaps or statistics.median(gaps) <= statistics.median(lengths)


def _clock_of(timeline: RankTimeline) -> str:
    """Return the name of a rank's clock; records of version 1 name only the host."""
    return timeline.started.clock or timeline.started.host


class ClockTrack:
    """A host's offset to the reference over time: linear between measurements. `offsets` may not be empty."""

    def __init__(self, offsets: Sequence[ClockOffset]) -> None:
        self._offsets = sorted(offsets, key=lambda offset: offset.at_seconds)
        self._times = [offset.at_seconds for offset in self._offsets]

    def offset(self, at_seconds: float) -> float:
        """Return what to add to a time of this host.

        Before the first and after the last measurement the nearest stretch of at least ten seconds goes on.
        """
        after = bisect.bisect_left(self._times, at_seconds)
        if 0 < after < len(self._times):
            return _line(self._offsets[after - 1], self._offsets[after], at_seconds)
        near, others = (
            (self._offsets[0], self._offsets) if after == 0 else (self._offsets[-1], self._offsets[::-1])
        )
        far = next((o for o in others if abs(o.at_seconds - near.at_seconds) >= _SLOPE_SECONDS), None)
        return near.offset_seconds if far is None else _line(near, far, at_seconds)

    def error(self, at_seconds: float) -> float:
        """Return by how much `offset` may be wrong: the measurements', and drift since the nearest of them."""
        after = bisect.bisect_left(self._times, at_seconds)
        around = self._offsets[max(0, after - 1) : after + 1]
        return min(o.error_seconds + DRIFT * abs(at_seconds - o.at_seconds) for o in around)


def _line(one: ClockOffset, other: ClockOffset, at_seconds: float) -> float:
    span = other.at_seconds - one.at_seconds
    if span == 0.0:
        return one.offset_seconds
    slope = (other.offset_seconds - one.offset_seconds) / span
    return one.offset_seconds + slope * (at_seconds - one.at_seconds)


@dataclass(frozen=True)
class CommonClock:
    """Timelines on rank 0's clock."""

    timelines: list[RankTimeline]
    """In the order given. Those on one clock have the same `Started.clock`; those of `incomparable` ranks are
    unchanged."""
    incomparable: frozenset[int] = frozenset()
    """Ranks whose times cannot be compared with rank 0's."""
    error_seconds: float = 0.0
    """By how much a time may be wrong beside that of another host."""
    notes: list[str] = field(default_factory=list)
    """What could not be corrected, in words."""


def common_clock(timelines: Sequence[RankTimeline]) -> CommonClock:
    """Put the timelines of all ranks on rank 0's clock.

    Ranks of one host share a clock (records of version 1: told by the host's name). Where rank 0 left no
    records, the one clock without offsets was its own.
    """
    groups: dict[str, list[RankTimeline]] = {}
    for timeline in timelines:
        groups.setdefault(_clock_of(timeline), []).append(timeline)
    if len(groups) <= 1:
        return CommonClock(list(timelines))
    tracks = {
        name: ClockTrack(offsets)
        for name, members in groups.items()
        if (offsets := [offset for member in members for offset in member.clock_offsets])
    }
    reference = next((name for name, members in groups.items() if any(m.started.rank == 0 for m in members)), None)
    bare = [name for name in groups if name not in tracks]
    if reference is None and len(bare) == 1:
        reference = bare[0]
    moved, incomparable, notes, worst = {}, set(), [], 0.0
    for name, members in groups.items():
        if name == reference:
            continue
        if name not in tracks:
            incomparable |= {member.started.rank for member in members}
            host = members[0].started.host
            notes.append(
                f"the clock of host {host} was not compared with rank 0's: times across hosts are not used"
            )
            continue
        for member in members:
            moved[id(member)] = _on_clock(member, tracks[name], reference or _RANK_0)
            worst = max(worst, _worst_error(member, tracks[name]))
    return CommonClock([moved.get(id(t), t) for t in timelines], frozenset(incomparable), worst, notes)


def _worst_error(timeline: RankTimeline, track: ClockTrack) -> float:
    if not timeline.steps:
        return 0.0
    middle = timeline.steps[len(timeline.steps) // 2].begin_seconds
    return max(track.error(at) for at in (timeline.steps[0].begin_seconds, middle, timeline.steps[-1].end_seconds))


def _on_clock(timeline: RankTimeline, track: ClockTrack, name: str) -> RankTimeline:
    begin = timeline.started.begin_seconds
    return dataclasses.replace(
        timeline,
        started=dataclasses.replace(timeline.started, begin_seconds=begin + track.offset(begin), clock=name),
        steps=[_move_step(row, _mapping(track, row.begin_seconds, row.end_seconds)) for row in timeline.steps],
        thinned=[_move_thinned(row, track) for row in timeline.thinned],
        samples=[_move_sample(sample, track) for sample in timeline.samples],
        device_phases={
            step: _move_phases(phases, _mapping(track, phases[0].begin_seconds, phases[-1].end_seconds))
            for step, phases in timeline.device_phases.items()
            if phases
        },
    )


def _move_sample(sample: Sample, track: ClockTrack) -> Sample:
    return dataclasses.replace(sample, at_seconds=sample.at_seconds + track.offset(sample.at_seconds))


def _mapping(track: ClockTrack, begin: float, end: float) -> Callable[[float], float]:
    """Return the map of the times around one step: cheaper than looking up each, and as exact."""
    first = track.offset(begin)
    slope = (track.offset(end) - first) / (end - begin) if end > begin else 0.0
    return lambda at: at + first + slope * (at - begin)


def _move_phases(phases: Sequence[Phase], move: Callable[[float], float]) -> tuple[Phase, ...]:
    return tuple(Phase(p.name, move(p.begin_seconds), move(p.end_seconds)) for p in phases)


def _move_step(row: StepRow, move: Callable[[float], float]) -> StepRow:
    return dataclasses.replace(
        row,
        begin_seconds=move(row.begin_seconds),
        end_seconds=move(row.end_seconds),
        exchanges=[_move_exchange(exchange, move) for exchange in row.exchanges],
        phases=_move_phases(row.phases, move),
    )


def _move_exchange(row: ExchangeRow, move: Callable[[float], float]) -> ExchangeRow:
    return ExchangeRow(
        [move(at) for at in row.launch_seconds],
        move(row.wait_begin_seconds),
        move(row.wait_end_seconds),
        row.sent_bytes,
        tuple(_move_bucket(bucket, move) for bucket in row.buckets),
        row.engine,
    )


def _move_bucket(bucket: BucketTimes, move: Callable[[float], float]) -> BucketTimes:
    first, last = bucket.first_ready_seconds, bucket.last_ready_seconds
    return dataclasses.replace(
        bucket,
        first_ready_seconds=None if first is None else move(first),
        last_ready_seconds=None if last is None else move(last),
        launch_seconds=move(bucket.launch_seconds),
        begin_seconds=move(bucket.begin_seconds),
        end_seconds=move(bucket.end_seconds),
    )


def _move_thinned(row: ThinnedRow, track: ClockTrack) -> ThinnedRow:
    begin, end = (at + track.offset(at) for at in (row.begin_seconds, row.end_seconds))
    return dataclasses.replace(row, begin_seconds=begin, end_seconds=end)
