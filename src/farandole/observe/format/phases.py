"""Where the time of a step went, by phase: pure functions on rows.

[Note: the innermost has the time] Phases nest and touch: a garbage collection inside a forward pass, a forward
pass inside an evaluation. Every instant of a step is counted once, for the phase that began last of those
that are open; an instant in no phase is `other`. So the parts always add up to the step.
"""

from __future__ import annotations

import heapq

from ...core.vocabulary.events import EXCHANGE, OTHER, Phase
from .rows import StepRow


def step_seconds(row: StepRow) -> dict[str, float]:
    """Return seconds by phase; their sum is the step's time.

    The wait for exchanges counts as `EXCHANGE`, what happened in none of the phases as `OTHER`. A step of
    version 1 knows data, exchange and other.
    """
    phases = [*row.phases]
    phases += [Phase(EXCHANGE, e.wait_begin_seconds, e.wait_end_seconds) for e in row.exchanges]
    seconds = divide(phases, row.begin_seconds, row.end_seconds)
    known = {phase.name for phase in row.phases}
    more = dict(row.more_seconds)
    if "data" not in known and "data" not in more and row.data_seconds:
        more["data"] = row.data_seconds
    for name, extra in more.items():
        taken = min(extra, seconds[OTHER])
        seconds[OTHER] -= taken
        seconds[name] = seconds.get(name, 0.0) + taken
    return seconds


def divide(phases: list[Phase], begin: float, end: float) -> dict[str, float]:
    """Divide the time from `begin` to `end` among `phases` and `OTHER`. See [Note: the innermost has the time]."""
    seconds = {OTHER: 0.0}
    waiting = sorted(
        (phase for phase in phases if phase.end_seconds > begin and phase.begin_seconds < end),
        key=lambda phase: (phase.begin_seconds, -phase.end_seconds),
    )
    open_phases: list[tuple[float, int, Phase]] = []  # begun last first
    at = begin
    for number, phase in enumerate(waiting):
        start = max(phase.begin_seconds, begin)
        at = _spend(seconds, open_phases, at, start)
        heapq.heappush(open_phases, (-start, -number, phase))
    _spend(seconds, open_phases, at, max(at, end))
    return seconds


def _spend(
    seconds: dict[str, float], open_phases: list[tuple[float, int, Phase]], at: float, until: float
) -> float:
    """Give the time from `at` to `until` to the innermost open phases."""
    while at < until:
        while open_phases and open_phases[0][2].end_seconds <= at:
            heapq.heappop(open_phases)
        if not open_phases:
            seconds[OTHER] += until - at
            return until
        phase = open_phases[0][2]
        stop = min(phase.end_seconds, until)
        seconds[phase.name] = seconds.get(phase.name, 0.0) + stop - at
        at = stop
    return at
