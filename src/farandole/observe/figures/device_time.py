"""The steps of a rank with an accelerator, by what that ran.

The host queues work and runs ahead of the device, so the host's phases say when work was queued. Time in which the
device computes belongs to what it computes, whatever the host did meanwhile; the host's own phases count only
where the device was idle. Steps of which no device times are recorded stay as they are.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ...core.vocabulary.events import Phase
from ..format.rows import StepRow
from ..read.timeline_reader import RankTimeline


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
