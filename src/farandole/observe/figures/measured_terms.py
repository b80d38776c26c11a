"""Measured terms of a step, by the planner's names: means over the steps that figures are of, and over the ranks.

They are the parts of a step (`step_parts`), so that they and what nothing predicts add up to the step.

[Note: whose terms] Computing is that of a usual rank, the median: what slower ranks take longer, and what others
wait for them, is the straggler term. In a pipeline all terms are those of the rank that computes most, as its
schedule is: the bubble is the simulated step less its computing, and what it waits beyond that are transfers.

[Note: terms that records do not tell apart] Recomputation is inside of backward, codecs inside of exchanges, and
some loops record several phases in one. Such terms are measured together. A term that was not seen at all is
unknown, which is not 0: the wait of a stream of an accelerator, or an exchange that no hook saw.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median_low

from ...core.vocabulary.events import (
    COMPUTING,
    OPTIMIZER,
    SETUP_DEVICE,
    SETUP_PIPELINE,
    SETUP_PIPELINE_RANK,
    SETUP_ZERO,
)
from ...core.vocabulary.predicted import Term
from ...core.vocabulary.spec import MOST_ZERO
from ..read.timeline_reader import RankTimeline
from .counted import sees_exchanges
from .figures import mean
from .step_parts import StepParts, undivided_share

_LEAST_UNDIVIDED = 0.02
_INNER: tuple[Term, ...] = ("tensor", "context", "expert", "shard")
_OF_GRADIENTS: tuple[Term, ...] = ("data", "codec")
_OF_UNITS: tuple[Term, ...] = ("data", "shard", "codec")


@dataclass(frozen=True)
class MeasuredTerm:
    """One term of a step, or several that cannot be told apart."""

    name: str
    terms: tuple[Term, ...]
    seconds: float | None
    """None: not known."""
    unknown: str = ""
    """Why it is not known."""


def measured_terms(
    timelines: Sequence[RankTimeline], parts: Sequence[Sequence[StepParts]], expected: Collection[str]
) -> list[MeasuredTerm]:
    """Return the terms of a run. See [Note: terms that records do not tell apart].

    Args:
        timelines: of all ranks.
        parts: by timeline: the steps that count, the same on all ranks.
        expected: terms that are predicted to take time; says under which of its names an exchange counts.
    """
    is_pipeline = any(timeline.setup.get(SETUP_PIPELINE) for timeline in timelines)
    chosen = _busiest(timelines, parts) if is_pipeline else parts
    every = [part for own in chosen for part in own]
    computing = [mean([part.compute for part in own]) for own in chosen]
    slower = max(0.0, mean(computing) - median_low(computing))
    return [
        *_computing(timelines, every, expected, slower),
        _exchange(timelines, every, expected),
        *(_pipeline(timelines, parts, every) if is_pipeline else []),
        _straggler(timelines, every, slower),
    ]


def _busiest(timelines: Sequence[RankTimeline], parts: Sequence[Sequence[StepParts]]) -> list[Sequence[StepParts]]:
    """Return the parts of those ranks whose place in a pipeline computes most."""
    by_place: dict[object, list[Sequence[StepParts]]] = {}
    for timeline, own in zip(timelines, parts, strict=True):
        by_place.setdefault(timeline.setup.get(SETUP_PIPELINE_RANK), []).append(own)
    return max(by_place.values(), key=lambda ranks: mean([part.compute for own in ranks for part in own]))


def _computing(
    timelines: Sequence[RankTimeline], every: Sequence[StepParts], expected: Collection[str], slower: float
) -> list[MeasuredTerm]:
    """Return computing, the optimizer, the loader, and the exchanges inside of passes."""
    optimizer = mean([part.phases.get(OPTIMIZER, 0.0) for part in every])
    data = mean([part.data for part in every])
    compute = mean([part.compute for part in every]) - optimizer - slower
    names: tuple[Term, ...] = ("compute", "recompute") if "recompute" in expected else ("compute",)
    seen = []
    for name in _INNER:
        measured = mean([part.inner.get(name, 0.0) for part in every])
        if name == "shard" and timelines[0].setup.get(SETUP_ZERO) == MOST_ZERO:
            continue  # units travel one by one: see `_exchange`
        if measured > 0:
            seen.append(MeasuredTerm(f"{name} exchange", (name,), measured))
        elif name in expected:
            names = (*names, name)
    label = " + ".join(names)
    loader = MeasuredTerm("loader", ("loader",), data)
    if undivided_share(every) >= _LEAST_UNDIVIDED:
        whole = compute + optimizer + data + mean([part.rest for part in every])
        return [MeasuredTerm(f"{label} + optimizer + loader", (*names, "optimizer", "loader"), whole), *seen]
    if any(part.phases.get(COMPUTING, 0.0) > 0 for part in every):
        both = MeasuredTerm(f"{label} + optimizer", (*names, "optimizer"), compute + optimizer)
        return [both, *seen, loader]
    steps = MeasuredTerm("optimizer", ("optimizer",), optimizer)
    return [MeasuredTerm(label, names, max(0.0, compute)), steps, *seen, loader]


def _exchange(
    timelines: Sequence[RankTimeline], every: Sequence[StepParts], expected: Collection[str]
) -> MeasuredTerm:
    of_units = timelines[0].setup.get(SETUP_ZERO) == MOST_ZERO
    usual: tuple[Term, ...] = ("shard",) if of_units else ("data",)
    terms = tuple(name for name in (_OF_UNITS if of_units else _OF_GRADIENTS) if name in expected) or usual
    name = f"{' + '.join(terms)} exchange"
    unseen = ""
    if timelines[0].started.size > 1 and not sees_exchanges(timelines):
        unseen = "no exchange of gradients was seen"
    elif of_units and timelines[0].setup.get(SETUP_DEVICE, "cpu") != "cpu":
        unseen = "waits of an accelerator's stream are not seen"
    if unseen:
        return MeasuredTerm(name, terms, None, unseen)
    return MeasuredTerm(name, terms, mean([part.of_gradients for part in every]))


def _pipeline(
    timelines: Sequence[RankTimeline], parts: Sequence[Sequence[StepParts]], every: Sequence[StepParts]
) -> list[MeasuredTerm]:
    """Return bubble and transfers; `every` are the steps of the rank that computes most."""
    from .pipeline_seconds import measure_pipeline  # schedules: most runs have none

    waited = mean([part.for_stages for part in every])
    counted = {part.step for part in every}
    rows = [[each for each in timeline.steps if each.step in counted] for timeline in timelines]
    measured = measure_pipeline(timelines, rows)
    if measured is None:
        return [MeasuredTerm("bubble + transfer", ("bubble", "transfer"), waited)]
    bubble = min(waited, max(0.0, measured.simulated_seconds - max(measured.computing)))
    return [MeasuredTerm("bubble", ("bubble",), bubble), MeasuredTerm("transfer", ("transfer",), waited - bubble)]


def _straggler(timelines: Sequence[RankTimeline], every: Sequence[StepParts], slower: float) -> MeasuredTerm:
    if timelines[0].started.size > 1 and not sees_exchanges(timelines):
        return MeasuredTerm("straggler", ("straggler",), None, "no exchange was seen that ranks wait in")
    waited = mean([part.waiting - part.for_stages - part.for_inner for part in every])
    return MeasuredTerm("straggler", ("straggler",), waited + slower)
