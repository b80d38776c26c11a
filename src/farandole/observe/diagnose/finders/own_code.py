"""The script's own code between the phases: how much of a step it takes, and where in the loop it stands."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from ....core.vocabulary.events import (
    BACKWARD,
    DATA,
    EXCHANGE,
    FORWARD,
    LOSS,
    OPTIMIZER,
    OTHER,
    PIPELINE_WAIT,
    Phase,
)
from ....core.vocabulary.units import format_seconds
from ...figures.figures import low_median, mean
from ...format.rows import StepRow
from ..facts.finding import Finding, Fix, Gain, confidence, format_cost
from ..facts.step_table import StepTable, has_phases, is_pipeline

_LEAST_SHARE = 0.05
"""Fraction of a step: every loop has some code of its own."""
_SHOWN = 3
_BEGIN = "begin"
_NAMES: Mapping[str, str] = {
    _BEGIN: "the previous optimizer.step()", DATA: "the batch", FORWARD: "forward", LOSS: "the loss",
    BACKWARD: "backward", EXCHANGE: "backward", OPTIMIZER: "optimizer.step()",
    PIPELINE_WAIT: "the pipeline's wait",
}  # fmt: skip
_IN_STEP = frozenset((FORWARD, LOSS, BACKWARD, EXCHANGE, PIPELINE_WAIT))

Place = tuple[str, str]
"""The phases before and after it, as a user knows them."""


def find_own_code(table: StepTable) -> list[Finding]:
    """Find time in no phase that ordinary steps of at least half of the ranks have."""
    timelines = table.records.timelines
    if not has_phases(table.rows) or any(timeline.device_phases for timeline in timelines):
        return []  # nothing tells the phases; or the host waits for an accelerator there, whose phases it hides
    by_step = [low_median([cell.phases.get(OTHER, 0.0) for cell in cells]) for cells in table.by_step()]
    places = usual_places(table)
    if len(table.rows) > 1 and not table.sees_exchanges:
        # Whatever exchanges the gradients may be waited for there.
        places = {place: spent for place, spent in places.items() if place[0] != BACKWARD}
    if is_pipeline(table):  # between what `fd.step` does of a schedule no code of the script runs
        places = {place: spent for place, spent in places.items() if not _IN_STEP.issuperset(place)}
    seconds = min(statistics.median(by_step), mean(by_step), sum(places.values()))
    share = seconds / table.step_seconds
    if share < _LEAST_SHARE:
        return []
    most = sorted(places, key=lambda place: -places[place])[:_SHOWN]
    where = _words(most[0]) if most and places[most[0]] > 0.5 * sum(places.values()) else "between the phases"
    evidence = [
        ", ".join(f"{format_seconds(places[place])} {_words(place)}" for place in most)
        + " (median of a step, mean of the ranks)"
    ]
    if not any(row.data_seconds for own in table.rows for row in own):
        evidence.append("the loader is not timed: waiting for batches is in it (give it to fd.shard or fd.record)")
    fix = Fix(
        "mark it with fd.phase to see it by name; then do it less often, move it out of the loop or to a thread",
        'with fd.phase("name"):', Gain(seconds, "all of it, if the loop no longer does it"),
    )  # fmt: skip
    title = f"your own code {where} takes {format_cost(seconds, share)}"
    return [
        Finding("other", title, seconds, share, phase=OTHER, evidence=tuple(evidence), fixes=(fix,),
                confidence=confidence(len(table.steps)))
    ]  # fmt: skip


def usual_places(table: StepTable) -> dict[Place, float]:
    """Return the seconds of a usual step in no phase, by place: the median over steps, the mean over ranks."""
    totals: dict[Place, float] = {}
    for own in table.rows:
        by_step = [gaps_of(row) for row in own]
        for place in {place for gaps in by_step for place in gaps}:
            usual = statistics.median([gaps.get(place, 0.0) for gaps in by_step])
            totals[place] = totals.get(place, 0.0) + usual / len(table.rows)
    return {place: seconds for place, seconds in totals.items() if seconds > 0}


def gaps_of(row: StepRow) -> dict[Place, float]:
    """Return the seconds of a step in no phase, by the phases before and after."""
    phases = [*row.phases, *(Phase(EXCHANGE, e.wait_begin_seconds, e.wait_end_seconds) for e in row.exchanges)]
    gaps: dict[Place, float] = {}
    at, before = row.begin_seconds, _BEGIN
    for phase in sorted(phases, key=lambda phase: (phase.begin_seconds, -phase.end_seconds)):
        if phase.begin_seconds > at:
            place = (before, phase.name)
            gaps[place] = gaps.get(place, 0.0) + phase.begin_seconds - at
        if phase.end_seconds > at:
            at, before = phase.end_seconds, phase.name
    if row.end_seconds > at:
        gaps[before, OPTIMIZER] = gaps.get((before, OPTIMIZER), 0.0) + row.end_seconds - at
    inner = row.inner_phases.get(OTHER, 0.0)  # of rows of tables: no row says in which gap
    for place in sorted(gaps, key=lambda place: -gaps[place]):
        taken = min(inner, gaps[place])
        gaps[place] -= taken
        inner -= taken
    return gaps


def _words(place: Place) -> str:
    first, second = (_NAMES.get(name, f"phase {name!r}") for name in place)
    return f"between {first} and {second}"
