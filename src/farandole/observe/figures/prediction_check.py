"""Predicted against measured, by term: what a plan said of its step beside what a run of it took.

The prediction is that of the plan that was applied; the measured terms are `measured_terms`'.

[Note: peak of memory] A rank on a CPU holds more than its model: what it held beside the model when the plan was
applied is taken off. Where it had held more before than in training, the training's peak is not known.

[Note: whose terms] Computing is that of a usual rank, the median: what slower ranks take longer, and what others
wait for them, is the straggler term. In a pipeline all terms are those of the rank that computes most, as its
schedule is: the bubble is the simulated step less its computing, and what it waits beyond that are transfers.

[Note: terms that records do not tell apart] Recomputation is inside of backward, codecs inside of exchanges, and
some loops record several phases in one. Such terms are measured together. A term that was not seen at all is
unknown, which is not 0: the wait of a stream of an accelerator, or an exchange that no hook saw.
"""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import median, median_low
from typing import Any

from ...core.schedule import build_schedule
from ...core.schedule_simulation import Schedule, StageTimes, simulate
from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.events import (
    BACKWARD,
    COMPUTING,
    FORWARD,
    OPTIMIZER,
    PIPELINE_WAIT,
    SETUP_DEVICE,
    SETUP_OTHER_BYTES,
    SETUP_PEAK_BEFORE,
    SETUP_PIPELINE,
    SETUP_PIPELINE_CUTS,
    SETUP_PIPELINE_RANK,
    SETUP_PREDICTED,
    SETUP_ZERO,
)
from ...core.vocabulary.rules import MOST_ZERO
from ...core.vocabulary.spec import GLOBAL_BATCH, HIGH, LOW, PEAK, RANKS, STEP, TERMS, Term, refuse_impossible
from ...core.vocabulary.units import format_bytes, format_seconds
from ..records.rows import StepRow, step_seconds
from ..records.run_reader import RunRecords
from ..records.timeline_reader import RankTimeline
from .figures import mean
from .inexact import counted_steps, sees_exchanges
from .step_parts import StepParts, step_parts, undivided_share

# Measured terms of a step, by the planner's names: means over the steps that figures are of, and over the ranks.
#
# They are the parts of a step (`step_parts`), so that they and what nothing predicts add up to the step.

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


NOT_PREDICTED = "not predicted"
"""Pauses, and the script's own code."""
_LEAST_SHARE = 0.005
"""Share of a step: a term that is predicted and measured to be less is left out."""
_LEAST_OFF = 0.05
"""Share of a step: smaller differences are not worth a remedy."""
_WIDTH = 100


@dataclass(frozen=True)
class TermCheck:
    """One term, or several that cannot be told apart, in seconds of a step."""

    name: str
    terms: tuple[str, ...]
    """Names as in `core.vocabulary.spec.TERMS`."""
    predicted_seconds: float | None
    """None: the plan does not say."""
    measured_seconds: float | None
    """None: not known."""
    unknown: str = ""
    """Why it is not known."""

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None if one of them is not known or predicted to be 0."""
        return _ratio(self.measured_seconds, self.predicted_seconds)

    @property
    def off_seconds(self) -> float:
        """Measured less predicted; 0 if one is not known."""
        if self.measured_seconds is None or self.predicted_seconds is None:
            return 0.0
        return self.measured_seconds - self.predicted_seconds


@dataclass(frozen=True)
class PeakCheck:
    """Memory of the rank that needs most."""

    predicted_bytes: int
    measured_bytes: int | None
    unknown: str = ""
    """Why it is not known."""
    beside_bytes: int = 0
    """What the rank held when the plan was applied that is not the model's: taken off already."""


@dataclass(frozen=True)
class PredictionCheck:
    """Predicted against measured. The terms and what nothing predicts add up to the step."""

    step: TermCheck
    interval_seconds: tuple[float, float] | None
    """What the step was expected in."""
    terms: tuple[TermCheck, ...]
    """With what nothing predicts; what is measured of them adds up to the step."""
    peak: PeakCheck | None
    notes: tuple[str, ...] = ()
    """Why this is no test of the prediction, if it is none."""
    run: str = ""
    """The run directory, for the remedy."""

    @property
    def is_inside(self) -> bool | None:
        """Whether the measured step is in the interval; None: not known, or no test of it."""
        if self.interval_seconds is None or self.step.measured_seconds is None or self.notes:
            return None
        return self.interval_seconds[0] <= self.step.measured_seconds <= self.interval_seconds[1]

    @property
    def most_off(self) -> TermCheck | None:
        """The term that is off by most; None where none is off by much."""
        known = [each for each in self.terms if each.measured_seconds is not None]
        worst = max(known, key=lambda each: abs(each.off_seconds), default=None)
        least = _LEAST_OFF * (self.step.predicted_seconds or 0.0)
        return worst if worst is not None and abs(worst.off_seconds) > least and not self.notes else None

    @property
    def remedy(self) -> str:
        """A command that helps with `most_off`; empty without one."""
        worst = self.most_off
        if worst is None:
            return ""
        run = shlex.quote(self.run or "RUN")
        if worst.name == NOT_PREDICTED:
            return f"farandole diagnose {run}"
        return f"farandole measure --from {run} --cluster cluster.toml --out corrected.toml"

    def to_mapping(self) -> dict[str, Any]:
        """Return everything as plain values."""
        values = asdict(self)
        for kept, each in zip((values["step"], *values["terms"]), (self.step, *self.terms), strict=True):
            kept["ratio"] = each.ratio
        worst = self.most_off
        if self.peak is not None:
            values["peak"]["ratio"] = _ratio(self.peak.measured_bytes, self.peak.predicted_bytes)
        more = {"most_off": None if worst is None else worst.name, "remedy": self.remedy}
        return {**values, "is_inside": self.is_inside, **more}

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """Return name, predicted, measured, ratio and a remark of the step, of each term and of the peak."""
        rows = [_row(each, self._remark if each is self.step else "") for each in (self.step, *self.terms)]
        if self.peak is not None:
            measured = self.peak.measured_bytes
            ratio = _ratio(measured, self.peak.predicted_bytes)
            text = "unknown" if measured is None else format_bytes(measured)
            shown = "" if ratio is None else f"{ratio:.2f}x"
            beside = self.peak.beside_bytes
            remark = f"beside {format_bytes(beside)} held before" if beside else self.peak.unknown
            rows.append(("peak memory", format_bytes(self.peak.predicted_bytes), text, shown, remark))
        return rows

    def advice(self) -> str:
        """Return which term is most off, in words; empty where none is off by much."""
        worst = self.most_off
        if worst is None:
            return ""
        by = format_seconds(abs(worst.off_seconds))
        return f"{worst.name} is most off: {by} {'more' if worst.off_seconds > 0 else 'less'} than predicted"

    def to_lines(self) -> list[str]:
        """Return the table for a terminal, at most 100 columns wide."""
        lines = [f"{'':<24} {'predicted':>12} {'measured':>12} {'ratio':>8}"]
        for name, predicted, measured, ratio, remark in self.rows():
            lines.append(f"{name[:24]:<24} {predicted:>12} {measured:>12} {ratio:>8}   {remark}".rstrip())
        lines = [line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}..." for line in lines]
        lines += [f"note: {note}" for note in self.notes]
        return [*lines, self.advice(), f"  {self.remedy}"] if self.remedy else lines

    @property
    def _remark(self) -> str:
        if self.interval_seconds is None:
            return ""
        low, high = map(format_seconds, self.interval_seconds)
        word = {True: "inside", False: "outside", None: "expected in"}[self.is_inside]
        return f"{word} {low} to {high}"


def check_prediction(records: RunRecords) -> PredictionCheck | None:
    """Return predicted against measured; None of a plan that predicts nothing, or a run without steps."""
    timelines = [timeline for timeline in records.timelines if timeline.steps]
    predicted = predicted_of(records)
    if not predicted or not timelines:
        return None
    steps = set(counted_steps(timelines))
    parts = [[part for part in own if part.step in steps] for own in step_parts(timelines)]
    if not all(parts):
        return None
    every = [part for own in parts for part in own]
    seconds = mean([part.seconds for part in every])
    interval = (predicted.get(LOW, predicted[STEP]), predicted.get(HIGH, predicted[STEP]))
    return PredictionCheck(
        step=TermCheck("step", (), predicted[STEP], seconds),
        interval_seconds=interval if LOW in predicted or HIGH in predicted else None,
        terms=_terms(predicted, timelines, parts, seconds),
        peak=_peak(predicted, timelines),
        notes=tuple(why_no_test(records)),
        run=str(records.directory),
    )


def predicted_of(records: RunRecords) -> Mapping[str, float]:
    """Return what the applied plan predicts: as a rank recorded it, or as the launcher wrote it; or nothing."""
    said = [timeline.setup.get(SETUP_PREDICTED) for timeline in records.timelines]
    texts = [text for text in said if isinstance(text, str)]
    try:
        found = json.loads(texts[0]) if texts else records.plan.get("predicted")
        if isinstance(found, dict):
            refuse_impossible(found)
            return found
    except (ValueError, RecursionError, PlanError):
        pass  # of a newer version, or damaged: nothing to compare with
    return {}


def _terms(
    predicted: Mapping[str, float],
    timelines: Sequence[RankTimeline],
    parts: Sequence[Sequence[StepParts]],
    seconds: float,
) -> tuple[TermCheck, ...]:
    says_terms = any(name in predicted for name in TERMS)
    expected = {name: predicted[name] for name in TERMS if predicted.get(name, 0.0) > 0}
    measured = measured_terms(timelines, parts, expected)
    found = [
        TermCheck(
            each.name,
            each.terms,
            sum(expected.get(term, 0.0) for term in each.terms) if says_terms else None,
            each.seconds,
            each.unknown,
        )
        for each in measured
    ]
    seen = {term for each in measured for term in each.terms}
    found += [TermCheck(name, (name,), value, 0.0) for name, value in expected.items() if name not in seen]
    rest = max(0.0, seconds - sum(each.measured_seconds or 0.0 for each in found))
    found.append(TermCheck(NOT_PREDICTED, (), 0.0 if says_terms else None, rest))
    return tuple(
        each
        for each in found
        if max(each.predicted_seconds or 0.0, each.measured_seconds or 0.0) > _LEAST_SHARE * seconds
    )


def why_no_test(records: RunRecords) -> list[str]:
    """Return why a run is no test of what its plan predicts: other ranks or samples than it is for; or nothing."""
    predicted, notes = predicted_of(records), []
    timelines = [timeline for timeline in records.timelines if timeline.steps]
    ranks = predicted.get(RANKS)
    if ranks is not None and round(ranks) != records.size:
        notes.append(f"predicted for {round(ranks)} ranks, and {records.size} ran: no test of the prediction")
    changes = _changes_beside_plan(records)
    if predicted and changes:
        notes.append(f"predicted without --set {' --set '.join(changes)}: no test of the prediction")
    batch = predicted.get(GLOBAL_BATCH)
    if batch is None or not records.plan.get("predicted"):
        return notes
    by_step = dict.fromkeys(counted_steps(timelines), 0)
    for timeline in timelines:
        for row in timeline.steps:
            if row.step in by_step:
                by_step[row.step] += row.samples
    samples = median(by_step.values()) if by_step else 0
    if samples and samples != batch:
        notes.append(
            f"predicted for {round(batch)} samples a step, and {samples:g} were: no test of the prediction; give "
            "the script that batch"
        )
    return notes


def _changes_beside_plan(records: RunRecords) -> list[str]:
    """Return what ``--set`` changed of the plan of ``--plan``, whose prediction is of the plan as it was."""
    typed, command = (records.facts.get(name) for name in ("typed_command", "command"))
    if not isinstance(typed, list) or not isinstance(command, list):
        return []
    words = [str(word) for word in typed[: len(typed) - max(0, len(command) - 1)]]  # the rest is the script's
    if not any(word.partition("=")[0] == "--plan" for word in words):
        return []
    pairs = zip(words, [*words[1:], ""], strict=True)
    settings = [following if word == "--set" else word for word, following in pairs if word.startswith("--set")]
    return [each.removeprefix("--set=") for each in settings]


def _peak(predicted: Mapping[str, float], timelines: Sequence[RankTimeline]) -> PeakCheck | None:
    """See [Note: peak of memory]."""
    if PEAK not in predicted:
        return None
    expected = round(predicted[PEAK])
    found = []
    for timeline in timelines:
        peak = max((each.peak_bytes for each in timeline.samples if each.peak_bytes is not None), default=None)
        other, before = (timeline.setup.get(name) for name in (SETUP_OTHER_BYTES, SETUP_PEAK_BEFORE))
        if not isinstance(other, int) or not isinstance(before, int):
            return PeakCheck(expected, None, "memory was not recorded")
        if peak is None:
            return PeakCheck(expected, None, "the run was too short for a sample")
        if peak <= before:
            return PeakCheck(expected, None, "more was held before training")
        found.append((peak - other, other))
    most, beside = max(found)
    return PeakCheck(expected, most, beside_bytes=beside)


def _ratio(measured: float | None, predicted: float | None) -> float | None:
    return measured / predicted if measured is not None and predicted else None


def _row(each: TermCheck, remark: str) -> tuple[str, str, str, str, str]:
    shown = [
        "-" if each.predicted_seconds is None else format_seconds(each.predicted_seconds),
        "unknown" if each.measured_seconds is None else format_seconds(each.measured_seconds),
    ]
    ratio = "" if each.ratio is None else f"{each.ratio:.2f}x"
    return each.name, shown[0], shown[1], ratio, remark or each.unknown


# Where the time of a pipeline goes: computing, the schedule's bubble, a slow stage, and transfers.
#
# [Note: three reasons to wait] The time of a step is simulated twice: with all stages as slow as their mean, and
# with those that were measured. Over the computing of a mean rank, the first is the bubble; the second over the
# first is the slow stage; and what the ranks spend over the second is communication. Pipelines wait for each other
# at the end of a step: of several, the slowest rank of each place counts for the slow stage, and the middle one
# for the mean.


_SLOWER = 1.1
"""Times as long as the fastest of its place from which a rank is a slow one."""


@dataclass(frozen=True)
class PipelineSeconds:
    """What was measured of a pipeline. See [Note: three reasons to wait]."""

    schedule: Schedule
    forward: list[float]
    """Seconds of a step by rank of the pipeline; of several pipelines, of the slowest."""
    backward: list[float]
    usual_forward: list[float]
    """The same of the middle one."""
    usual_backward: list[float]
    seconds: float
    """Seconds of the pipeline in a step: computing and waiting."""
    cuts: list[str]
    slow_ranks: list[tuple[int, ...]]
    """By rank of the pipeline: ranks that are slower than others of the same place; empty where none is."""

    @property
    def computing(self) -> list[float]:
        """Forward and backward."""
        return [f + b for f, b in zip(self.forward, self.backward, strict=True)]

    @property
    def usual_seconds(self) -> float:
        """Forward and backward of a mean rank."""
        return mean(self.usual_forward) + mean(self.usual_backward)

    @cached_property
    def _even(self) -> float:
        count = len(self.forward)
        return _simulated(self, [mean(self.usual_forward)] * count, [mean(self.usual_backward)] * count)

    @cached_property
    def simulated_seconds(self) -> float:
        """The schedule with the stages as they were measured, and no transfers."""
        return _simulated(self, self.forward, self.backward)

    @property
    def bubble(self) -> float:
        """What the schedule costs where all stages take as long."""
        return self._even - self.usual_seconds

    @property
    def slow_stage(self) -> float:
        """What unequal stages cost."""
        return max(0.0, self.simulated_seconds - self._even)

    @property
    def transfer(self) -> float:
        """What transfers between stages cost that nothing hides."""
        return max(0.0, self.seconds - max(self.simulated_seconds, self._even))


def measure_pipeline(
    timelines: Sequence[RankTimeline], rows: Sequence[Sequence[StepRow]]
) -> PipelineSeconds | None:
    """Return where the time of pipelines goes; None if the ranks form none, or `rows` (by rank) do not tell."""
    facts = [str(timeline.setup.get(SETUP_PIPELINE) or "") for timeline in timelines]
    if not facts or not facts[0] or len(set(facts)) > 1:
        return None
    try:
        name, *numbers = facts[0].split()
        ranks, micro_batches, chunks = map(int, numbers)
        schedule = build_schedule(name, ranks, micro_batches, chunks if name == "interleaved" else 0)
    except (ValueError, PlanError):
        return None  # of a newer version
    places: list[dict[int, dict[str, float]]] = [{} for _ in range(ranks)]
    """By place in the pipeline and rank: median seconds of each phase."""
    for timeline, own in zip(timelines, rows, strict=True):
        place = timeline.setup.get(SETUP_PIPELINE_RANK)
        if not isinstance(place, int) or not 0 <= place < ranks:
            return None
        if own:
            places[place][timeline.rank] = _medians([step_seconds(row) for row in own])
    if not all(places):
        return None
    slowest = [max(here.values(), key=_computing_seconds) for here in places]
    cuts = str(timelines[0].setup.get(SETUP_PIPELINE_CUTS) or "").split()
    return PipelineSeconds(
        schedule,
        [each[FORWARD] for each in slowest],
        [each[BACKWARD] for each in slowest],
        [statistics.median(each[FORWARD] for each in here.values()) for here in places],
        [statistics.median(each[BACKWARD] for each in here.values()) for here in places],
        mean([sum(each.values()) for here in places for each in here.values()]),
        cuts,
        [_slow_ranks(here) for here in places],
    )


def _medians(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = (FORWARD, BACKWARD, PIPELINE_WAIT)
    return {name: statistics.median(step.get(name, 0.0) for step in steps) for name in names}


def _computing_seconds(phases: Mapping[str, float]) -> float:
    return phases[FORWARD] + phases[BACKWARD]


def _slow_ranks(here: Mapping[int, Mapping[str, float]]) -> tuple[int, ...]:
    """Return the ranks of one place that are slower than the fastest of it by more than a tenth."""
    least = min(map(_computing_seconds, here.values()))
    slow = tuple(rank for rank, phases in here.items() if _computing_seconds(phases) > _SLOWER * least)
    return slow if len(slow) < len(here) else ()


def _simulated(measured: PipelineSeconds, forward: list[float], backward: list[float]) -> float:
    schedule = measured.schedule
    each = schedule.micro_batches * (schedule.stages // schedule.ranks)
    times = [
        StageTimes(forward[rank] / each, backward[rank] / 2 / each, backward[rank] / 2 / each)
        for rank in schedule.stage_ranks
    ]
    return simulate(schedule, times).total_seconds
