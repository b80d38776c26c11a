"""Where the time of a step of one rank went: the one definition, for all commands.

The closing summary, the page, the diagnosis, the line while training, exports and benchmarks. The parts but
`hidden` add up to the step. The split of a wait and what hides are `waits`', phases are `phases.step_seconds`'s.

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
from ..format.rows import StepRow, step_seconds
from ..read.clock import are_comparable
from ..read.timeline_reader import RankTimeline
from .waits import Wait, hidden_by_step, rows_by_step, split_rows, waits_of, with_waits

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
    """Return the parts by timeline and step. See [Note: two ways to split a wait] in `waits`.

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
