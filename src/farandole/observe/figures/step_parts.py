"""Where the time of a step of one rank went: the one definition, for all commands.

The closing summary, the page, the diagnosis, the line while training, exports and benchmarks. The parts but
`hidden` add up to the step. Phases are those of `records.rows.step_seconds`.

[Note: waits that cannot be split] Where gradients are named operations, a rank records from when to when it waited
for all of them, and it is unknown when the others came: a phase `EXCHANGE`, which is communication. So is the time
of exchanges that were too many to keep one by one.

[Note: exchanges inside of phases] For those of activations, stepped parameters and rows no arrival is recorded:
what the rank of a group that waits least for them takes is the network, and what others of it take longer is
waiting. They are no part of the phase that they are in. Groups follow from the degrees; of a run that did not
record these, and of rows, all ranks are one.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...core.vocabulary.degrees import ORDER, SAME_PARAMETERS, Degrees
from ...core.vocabulary.events import (
    BACKWARD,
    COMPUTING,
    DATA,
    EXCHANGE,
    FORWARD,
    LOSS,
    OPTIMIZER,
    OTHER,
    PIPELINE_WAIT,
    SETUP_DEGREES,
    UNDIVIDED,
    Phase,
)
from ..records.clock import are_comparable
from ..records.rows import ExchangeRow, StepRow, step_seconds
from ..records.timeline_reader import RankTimeline
from .figures import busy_seconds, split_wait

# The steps of a rank with an accelerator, by what that ran.
#
# The host queues work and runs ahead of the device, so the host's phases say when work was queued. Time in which
# the device computes belongs to what it computes, whatever the host did meanwhile; the host's own phases count
# only where the device was idle. Steps of which no device times are recorded stay as they are.


def rows_of(timeline: RankTimeline) -> list[StepRow]:
    """Return the steps of a rank, those of its accelerator with that one's phases."""
    if not timeline.device_phases:
        return timeline.steps
    ran = sorted((each for own in timeline.device_phases.values() for each in own), key=lambda p: p.begin_seconds)
    ends = [0.0]  # of all before: a phase may end after the next one begins
    for phase in ran:
        ends.append(max(ends[-1], phase.end_seconds))
    rows = []
    for row in timeline.steps:
        first = max(0, bisect.bisect_right(ends, row.begin_seconds) - 1)
        own = [p for p in ran[first : bisect.bisect_left(ran, row.end_seconds, key=lambda p: p.begin_seconds)]
               if p.end_seconds > row.begin_seconds]  # fmt: skip
        has_times = bool(timeline.device_phases.get(row.step))
        rows.append(_with_device(row, own) if has_times else row)
    return rows


def _with_device(row: StepRow, ran: Sequence[Phase]) -> StepRow:
    busy: list[tuple[float, float]] = []
    for phase in ran:
        if busy and phase.begin_seconds <= busy[-1][1]:
            busy[-1] = busy[-1][0], max(busy[-1][1], phase.end_seconds)
        else:
            busy.append((phase.begin_seconds, phase.end_seconds))
    idle = [part for phase in row.phases for part in _outside(phase, busy)]
    return replace(row, phases=(*ran, *idle), data_seconds=0.0)


def _outside(phase: Phase, busy: Iterable[tuple[float, float]]) -> list[Phase]:
    """Return the parts of a phase that are in none of the intervals, which are in order."""
    parts, at = [], phase.begin_seconds
    for begin, end in busy:
        if end <= at or begin >= phase.end_seconds:
            continue
        if begin > at:
            parts.append(Phase(phase.name, at, begin))
        at = end
    if at < phase.end_seconds:
        parts.append(Phase(phase.name, at, phase.end_seconds))
    return parts


COMPUTE = (FORWARD, LOSS, BACKWARD, COMPUTING, OPTIMIZER)
"""Phases in which a rank computes."""
COMPUTE_AND_REST = (*COMPUTE, OTHER)
"""And the time in no phase, in which the script runs."""
SHARES = ("compute", "communication", "waiting", "data")
"""The parts of a summary. Its compute is everything but waits for others, for the network and for data."""


_NOT_SPLIT = "exchange, not split"


@dataclass(frozen=True)
class StepParts:
    """One step of one rank, in seconds."""

    step: int
    begin_seconds: float
    seconds: float
    compute: float
    communication: float
    """Exposed: waiting for the network with nothing left to compute."""
    waiting: float
    """For ranks that were not there yet, and for other stages of a pipeline."""
    for_stages: float
    """Part of `waiting`: for other stages."""
    for_inner: float
    """Part of `waiting`: in exchanges inside of phases."""
    data: float
    pauses: float
    """Garbage collection, checkpoints, evaluation, and what the script names with `fd.phase`."""
    rest: float
    """In no phase, or in `UNDIVIDED`: computing and waiting for data in one."""
    hidden: float
    """Communication behind computing: not one of the parts that add up, and the same for all ranks of a step."""
    phases: Mapping[str, float]
    """Seconds by the name of the phase without exchanges inside; the wait for those of gradients is `EXCHANGE`."""
    inner: Mapping[str, float]
    """Exchanges inside of phases by degree: of `communication` and of `waiting`."""

    @property
    def of_gradients(self) -> float:
        """Part of `communication`: exchanges of gradients."""
        return self.communication - (sum(self.inner.values()) - self.for_inner)

    @property
    def busy(self) -> float:
        """All but waits for others, for the network and for data: the compute of a summary."""
        return self.compute + self.pauses + self.rest

    def share_seconds(self) -> dict[str, float]:
        """Return the seconds of each of `SHARES`."""
        return dict(zip(SHARES, (self.busy, self.communication, self.waiting, self.data), strict=True))


def step_parts(
    timelines: Sequence[RankTimeline], *, one_clock: bool | None = None, finds_hidden: bool = False
) -> list[list[StepParts]]:
    """Return the parts by timeline and step. See [Note: two ways to split a wait].

    `one_clock`: whether the timelines can be compared; None: as `clock.are_comparable` says.
    """
    rows = [rows_of(timeline) for timeline in timelines]
    one_clock = are_comparable(timelines) if one_clock is None else one_clock
    split = split_rows(rows, one_clock=one_clock)
    wanted = finds_hidden and len(rows) > 1
    hidden = hidden_by_step(rows_by_step(rows), one_clock=one_clock) if wanted else {}
    least = least_inner(timelines, rows)
    return [
        [
            parts_of(row, waits_of(row), own, inner, hidden.get(row.step, 0.0))
            for row, own, inner in zip(*of_rank, strict=True)
        ]
        for of_rank in zip(rows, split, least, strict=True)
    ]


def least_inner(
    timelines: Sequence[RankTimeline], rows: Sequence[Sequence[StepRow]]
) -> list[list[dict[str, float]]]:
    """Return what the network takes of exchanges inside of phases, by degree; by timeline and step as `rows`."""
    found: dict[tuple[int, str, object], float] = {}
    groups = [_groups_of(timeline) for timeline in timelines]
    for own, group in zip(rows, groups, strict=True):
        for row in own:
            for name, seconds in row.inner_seconds.items():
                key = (row.step, name, group.get(name))
                found[key] = min(seconds, found.get(key, seconds))
    return [
        [{name: found[row.step, name, group.get(name)] for name in row.inner_seconds} for row in own]
        for own, group in zip(rows, groups, strict=True)
    ]


def _groups_of(timeline: RankTimeline) -> dict[str, tuple[int, ...]]:
    """Return what tells the group of a rank from others, by degree. See [Note: exchanges inside of phases]."""
    sizes = str(timeline.setup.get(SETUP_DEGREES) or "").split()
    if len(sizes) != len(ORDER) or not all(size.isdecimal() for size in sizes):
        return {}
    place = Degrees(*map(int, sizes)).place(timeline.rank)
    within = {**{name: (name,) for name in ORDER}, "shard": SAME_PARAMETERS}
    return {name: tuple(place[each] for each in ORDER if each not in names) for name, names in within.items()}


def parts_of(
    row: StepRow,
    waits: Sequence[Wait],
    split: tuple[float, float],
    least: Mapping[str, float],
    hidden: float = 0.0,
) -> StepParts:
    """Return one step's parts.

    `split`: seconds of its `waits` for others, and of communication; `least`: its `least_inner`.
    """
    phases = step_seconds(_rename_unsplit_waits(with_waits(row, waits)))
    for name, seconds in row.inner_phases.items():
        phases[name] = max(0.0, phases.get(name, 0.0) - seconds)
    inner = row.inner_seconds if row.inner_phases else {}  # older records do not say in which phases
    for_inner = sum(seconds - least[name] for name, seconds in inner.items())
    # A wait that a pause interrupts counts as the pause: both shares of the wait shrink alike.
    seen, in_waits = sum(split), phases.get(EXCHANGE, 0.0)
    waiting = min(in_waits, split[0] * in_waits / seen) if seen > 0 else 0.0
    exposed = in_waits + phases.pop(_NOT_SPLIT, 0.0)
    if exposed:
        phases[EXCHANGE] = exposed
    for_stages = phases.pop(PIPELINE_WAIT, 0.0)
    data, rest = phases.get(DATA, 0.0), phases.get(OTHER, 0.0) + phases.get(UNDIVIDED, 0.0)
    compute = sum(phases.get(name, 0.0) for name in COMPUTE)
    # Computing was not recorded by phase, as in version 1.
    if not any(name in phases for name in (*COMPUTE, UNDIVIDED)):
        compute, rest = compute + rest, 0.0
    known = (*COMPUTE, DATA, EXCHANGE, OTHER, UNDIVIDED)
    pauses = sum(seconds for name, seconds in phases.items() if name not in known)
    return StepParts(
        row.step,
        row.begin_seconds,
        row.end_seconds - row.begin_seconds,
        compute,
        exposed - waiting + sum(inner.values()) - for_inner,
        waiting + for_stages + for_inner,
        for_stages,
        for_inner,
        data,
        pauses,
        rest,
        hidden,
        phases,
        inner,
    )


def _rename_unsplit_waits(row: StepRow) -> StepRow:
    """Give waits that cannot be split a name of their own."""
    phases = tuple(replace(phase, name=_NOT_SPLIT) if phase.name == EXCHANGE else phase for phase in row.phases)
    more = {(_NOT_SPLIT if name == EXCHANGE else name): seconds for name, seconds in row.more_seconds.items()}
    return replace(row, phases=phases, more_seconds=more)


def undivided_share(parts: Sequence[StepParts]) -> float:
    """Return the share of the steps in which computing and waiting for data are not told apart."""
    total = sum(part.seconds for part in parts)
    return sum(part.phases.get(UNDIVIDED, 0.0) for part in parts) / total if total else 0.0


def shares_of(parts: Sequence[StepParts]) -> dict[str, float]:
    """Return the parts of all steps beside their time, by the names of `SHARES`."""
    total = sum(part.seconds for part in parts)
    each = [part.share_seconds() for part in parts]
    return {name: sum(seconds[name] for seconds in each) / total if total else 0.0 for name in SHARES}


# Waits for exchanges, and when their buckets were on the wire: what the summary, the page and the diagnosis say.
#
# [Note: two ways to split a wait] Until the last rank has launched its last bucket, the others wait for it; the
# rest is the network. Where clocks cannot be compared, the rank that waits least tells what the network takes.
#
# [Note: when a bucket is on the wire] A sum travels from when its turn has come on the last rank until the last
# rank has it: who hands its part over earlier waits for that rank, not for the network. Where clocks cannot be
# compared, the rank whose buckets took the least time all in all tells: it waited least for the others. What of
# that time lies before the last rank has nothing left to compute is hidden. Nothing here is estimated from a rate.


_UNSEEN_SECONDS = 1.5e-6
"""Records are exact to a microsecond: a wait that was seen is longer."""
_SAME_SECONDS = 1e-4


@dataclass(frozen=True)
class Wait:
    """One exchange of one rank."""

    arrived: float
    """When it launched its last bucket."""
    begin: float
    end: float


class WireTime(NamedTuple):
    """When the buckets of one exchange were on the wire, and from when on no rank computed."""

    spans: Sequence[tuple[float, float]]
    """By bucket, in launch order: begin and end. They may overlap."""
    computed: float

    @property
    def busy_seconds(self) -> float:
        """How long something was on the wire."""
        return busy_seconds(self.spans)

    @property
    def hidden_seconds(self) -> float:
        """How much of that was behind computing."""
        return busy_seconds([(begin, min(end, self.computed)) for begin, end in self.spans])

    @property
    def shares_wire(self) -> list[bool]:
        """Whether each bucket left before the ones before it had arrived."""
        free, found = -float("inf"), []
        for begin, end in self.spans:
            found.append(begin < free)
            free = max(free, end)
        return found

    @property
    def serialized_seconds(self) -> list[float]:
        """How long each bucket took once the one before it had arrived."""
        free, found = -float("inf"), []
        for begin, end in self.spans:
            found.append(max(0.0, end - max(begin, free)))
            free = max(free, end)
        return found


def waits_of(row: StepRow) -> list[Wait]:
    """Return when a rank arrived at each exchange of a step, and from when to when it waited for it.

    If no wait was recorded although the last bucket was in flight in backward, backward waited itself, as
    wrappers do whose hooks are not timed.
    """
    return [_wait_of(exchange, row) for exchange in row.exchanges]


def _wait_of(exchange: ExchangeRow, row: StepRow) -> Wait:
    begin, end = exchange.wait_begin_seconds, exchange.wait_end_seconds
    arrived = max(exchange.launch_seconds, default=begin)  # named operations leave in any order
    if exchange.buckets and end - begin < _UNSEEN_SECONDS:
        last = max(bucket.end_seconds for bucket in exchange.buckets)
        backward = max((p.end_seconds for p in row.phases if p.name == BACKWARD), default=0.0)
        if arrived + _SAME_SECONDS < last <= backward + _SAME_SECONDS:
            return Wait(arrived, arrived, last)
    return Wait(arrived, begin, end)


def with_waits(row: StepRow, waits: Sequence[Wait]) -> StepRow:
    """Return the row with the unrecorded waits instead of the recorded ones."""
    exchanges = [
        replace(exchange, wait_begin_seconds=wait.begin, wait_end_seconds=wait.end)
        for exchange, wait in zip(row.exchanges, waits, strict=True)
    ]
    return replace(row, exchanges=exchanges)


def split_waits(waits: Sequence[Sequence[Wait]], *, one_clock: bool) -> list[tuple[float, float]]:
    """Return (waiting for others, communication) in seconds by rank; `waits` are those of one step, by rank.

    See [Note: two ways to split a wait].
    """
    totals = [(0.0, 0.0)] * len(waits)
    for number in range(max((len(own) for own in waits), default=0)):
        here = [own[number] if number < len(own) else None for own in waits]
        present = [wait for wait in here if wait is not None]
        last = max(wait.arrived for wait in present)
        least = min(wait.end - wait.begin for wait in present)
        for rank, wait in enumerate(here):
            if wait is None:
                continue
            latest = last if one_clock else wait.end - least
            waiting, wire = split_wait(wait.begin, wait.end, latest)
            totals[rank] = (totals[rank][0] + waiting, totals[rank][1] + wire)
    return totals


def wires_of(rows: Sequence[StepRow], *, one_clock: bool) -> list[WireTime | None]:
    """Return the exchanges of one step, given the rows of all ranks that have it.

    None stands for an exchange whose buckets were not timed, or not as many on every rank.
    See [Note: when a bucket is on the wire].
    """
    count = min((len(row.exchanges) for row in rows), default=0)
    waits = [waits_of(row) for row in rows]
    return [
        _wire_of([row.exchanges[i] for row in rows], [own[i] for own in waits], one_clock=one_clock)
        for i in range(count)
    ]


def _wire_of(exchanges: Sequence[ExchangeRow], waits: Sequence[Wait], *, one_clock: bool) -> WireTime | None:
    count = len(exchanges[0].buckets)
    if count == 0 or any(len(exchange.buckets) != count for exchange in exchanges):
        return None
    if one_clock:
        spans = [
            (max(times.begin_seconds for times in bucket), max(times.end_seconds for times in bucket))
            for bucket in zip(*(exchange.buckets for exchange in exchanges), strict=True)
        ]
        return WireTime(spans, max(wait.begin for wait in waits))
    wires = [
        WireTime([(times.begin_seconds, times.end_seconds) for times in exchange.buckets], wait.begin)
        for exchange, wait in zip(exchanges, waits, strict=True)
    ]
    return min(wires, key=lambda wire: wire.busy_seconds)


def hidden_by_step(by_step: Mapping[int, Sequence[StepRow]], *, one_clock: bool) -> dict[int, float]:
    """Return the seconds of communication behind computing, by step; `by_step` are the rows of all ranks."""
    return {
        step: sum(wire.hidden_seconds for wire in wires_of(rows, one_clock=one_clock) if wire is not None)
        for step, rows in by_step.items()
    }


def rows_by_step(rows: Sequence[Sequence[StepRow]]) -> dict[int, list[StepRow]]:
    """Return the rows of all ranks that have a step, by step; `rows` are by rank and step."""
    found: dict[int, list[StepRow]] = {}
    for own in rows:
        for row in own:
            found.setdefault(row.step, []).append(row)
    return found


def split_rows(rows: Sequence[Sequence[StepRow]], *, one_clock: bool) -> list[list[tuple[float, float]]]:
    """Return (waiting for others, communication) in seconds, by rank and step as `rows` are."""
    members: dict[int, list[tuple[int, int]]] = {}
    for rank, own in enumerate(rows):
        for number, row in enumerate(own):
            members.setdefault(row.step, []).append((rank, number))
    found = [[(0.0, 0.0)] * len(own) for own in rows]
    for here in members.values():
        split = split_waits([waits_of(rows[rank][number]) for rank, number in here], one_clock=one_clock)
        for (rank, number), seconds in zip(here, split, strict=True):
            found[rank][number] = seconds
    return found
