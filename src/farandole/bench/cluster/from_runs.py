"""A cluster corrected by what runs took: ``farandole measure --from RUN --cluster FILE --out FILE``.

[Note: what a run tells of a cluster] Buckets without a codec tell latency and bandwidth of the all-reduce, each by
its own time on the wire. The other terms have one number each, beside the one that was predicted: all
figures of that term are corrected by one factor. A rank that computes more slowly than the median of the others is
a slow rank. The cluster must be the one that the plans of the runs were made with.

Steps are cut into up to eight blocks, each an observation: the spread between them is that of the figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median, median_low
from typing import Any

from ...core.cluster import Cluster, collective_work
from ...core.vocabulary.codec_spec import NONE
from ...core.vocabulary.degrees import Degrees, degrees_of
from ...core.vocabulary.errors import ConfigError, DataError, PlanError
from ...core.vocabulary.spec import STEP, TERMS, Plan
from ...observe.figures.figures import mean
from ...observe.figures.inexact import counted_steps
from ...observe.figures.prediction_check import MeasuredTerm, measured_terms, predicted_of, why_no_test
from ...observe.figures.step_parts import StepParts, rows_by_step, step_parts, wires_of
from ...observe.records.clock import are_comparable
from ...observe.records.rows import StepRow
from ...observe.records.run_reader import RunRecords, read_run
from ...observe.records.timeline_reader import RankTimeline
from ...plan.refit import LEAST_CHANGE, Observation, Refit, figures_below, note_runs, refit

LEAST_STEPS = 10
_BLOCKS = 8
_SLOWER = 1.05
_OPERATIONS: Mapping[str, tuple[str, ...]] = {
    "tensor": ("all_reduce",), "context": ("all_to_all", "send"), "expert": ("all_to_all",), "transfer": ("send",),
    "shard": ("all_gather", "reduce_scatter"), "data": ("all_reduce",),
}  # fmt: skip
"""Whose figures the exchanges of a degree are predicted by."""
_INSTEAD = {"bf16": ("fp16", "fp32"), "fp16": ("bf16", "fp32")}


@dataclass
class _Run:
    """A run, as far as it tells of a cluster."""

    records: RunRecords
    timelines: Sequence[RankTimeline]
    parts: list[list[StepParts]]
    predicted: Mapping[str, float]
    plan: Plan
    degrees: Degrees
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its directory's, and when it began."""
        started = self.records.facts.get("started", "")
        return f"{self.records.name} {started}".strip()


def correct_cluster(cluster: Cluster, runs: Sequence[Path]) -> Refit:
    """Return the cluster with the figures corrected that runs contradict.

    See [Note: what a run tells of a cluster]. Raises `ConfigError` for runs that tell nothing, or that the cluster
    is fitted to already, and `DataError` for a directory that is no run's.
    """
    read = [_read(path) for path in runs]
    noted = note_runs(cluster, [run.name for run in read])
    observations = [each for run in read for each in _observe(cluster, run)]
    observations, left = _told_once(observations)
    found = refit(cluster, observations)
    speeds = dict(cluster.rank_speeds)
    for run in read:
        speeds |= _speeds(cluster, run)
    corrected = replace(found.cluster, rank_speeds=speeds, fingerprint=noted.fingerprint)
    return replace(found, cluster=corrected, notes=(*(note for run in read for note in run.notes), *left))


def _told_once(observations: Sequence[Observation]) -> tuple[list[Observation], list[str]]:
    """Leave out what has one number for an operation whose buckets tell it better; return why, too."""
    by_bucket = {path.rpartition(".")[0] for each in observations for path in each.features if path[-1] != "*"}
    kept, left = [], {}
    for each in observations:
        if any(path[-1] == "*" and path.removesuffix(".*") in by_bucket for path in each.features):
            left[each.name] = f"{each.name}: buckets of gradients tell more of its operation"
        else:
            kept.append(each)
    return kept, list(left.values())


def describe_refit(found: Refit, before: Cluster) -> str:
    """Return what was corrected, for a terminal, at most 100 columns wide."""
    lines = [f"{'':<58} {'before':>12} {'after':>12}"] if found.corrections else []
    for each in found.corrections:
        low, high = each.after.interval()
        lines.append(f"{each.path[:58]:<58} {each.before.value:>12.4g} {each.after.value:>12.4g}")
        lines.append(f"{'':<58} {each.before.source:>12} {f'{low:.3g} to {high:.3g}':>25}")
    for rank, speed in found.cluster.rank_speeds.items():
        if before.rank_speeds.get(rank) != speed:
            lines.append(f"{f'rank_speeds.{rank}':<58} {before.rank_speeds.get(rank, 1.0):>12.4g} {speed:>12.4g}")
    if not lines:
        lines = [f"no figure is off by more than {LEAST_CHANGE:.0%}"]
    lines.append(
        f"mean error of what was measured: {found.error_before:.1%} before, {found.error_after:.1%} after"
    )
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])


def refit_mapping(found: Refit) -> dict[str, Any]:
    """Return what was corrected as plain values, without the cluster."""
    return {
        "version": 1,
        "corrections": [asdict(each) for each in found.corrections],
        "rank_speeds": {str(rank): speed for rank, speed in found.cluster.rank_speeds.items()},
        "error_before": found.error_before,
        "error_after": found.error_after,
        "notes": list(found.notes),
    }


def _read(path: Path) -> _Run:
    records = read_run(path, for_diagnosis=True)
    timelines = [timeline for timeline in records.timelines if timeline.steps]
    predicted = predicted_of(records)
    if not predicted:
        raise ConfigError(
            f"{path}: the plan of this run predicts nothing",
            remedy="give a run of a plan that farandole plan wrote",
        )
    if len(timelines) < records.size:
        raise DataError(f"{path}: {records.size - len(timelines)} of {records.size} ranks left no steps")
    steps = set(counted_steps(timelines))
    if len(steps) < LEAST_STEPS:
        raise ConfigError(
            f"{path}: {len(steps)} steps after the warm-up, expected at least {LEAST_STEPS}",
            remedy="let it run longer",
        )
    for problem in why_no_test(records):
        raise ConfigError(f"{path}: {problem}", remedy="give a run of the plan as it was made")
    parts = [[part for part in own if part.step in steps] for own in step_parts(timelines)]
    try:
        plan = Plan.from_mapping(records.plan, where=f"{path}: run.json: plan")
        degrees = degrees_of(plan, records.size)
    except PlanError as problem:
        raise DataError(str(problem)) from None
    run = _Run(records, timelines, parts, predicted, plan, degrees)
    if not plan.predicted:
        run.notes.append(
            f"{path}: the script gave the plan itself, so its degrees are not known; all ranks are taken as data "
            "parallel (farandole run --plan records it)"
        )
    return run


def _observe(cluster: Cluster, run: _Run) -> list[Observation]:
    """Return what a run tells, by block of steps. See [Note: what a run tells of a cluster]."""
    expected: dict[str, float] = {n: run.predicted[n] for n in TERMS if run.predicted.get(n, 0.0) > 0}
    buckets = _buckets(cluster, run)
    found = [*buckets]
    steps = [part.step for part in run.parts[0]]
    left: dict[str, str] = {}
    for block in _blocks(steps):
        parts = [[part for part in own if part.step in block] for own in run.parts]
        for term in measured_terms(run.timelines, parts, expected):
            features, why = _features(cluster, run, term, expected, has_buckets=bool(buckets))
            if features and term.seconds:
                found.append(Observation(f"{term.name} of {run.name}", term.seconds, features))
            elif why:
                left[term.name] = why
    run.notes += [f"{run.name}: {name}: {why}" for name, why in left.items()]
    return found


def _blocks(steps: Sequence[int]) -> list[frozenset[int]]:
    count = min(_BLOCKS, max(1, len(steps) // 2))
    return [frozenset(steps[len(steps) * i // count : len(steps) * (i + 1) // count]) for i in range(count)]


def _features(
    cluster: Cluster, run: _Run, term: MeasuredTerm, expected: Mapping[str, float], *, has_buckets: bool
) -> tuple[dict[str, float], str]:
    """Return what a term is made of, or why it cannot be corrected; neither where nothing was predicted."""
    predicted = sum(expected.get(name, 0.0) for name in term.terms)
    off = (term.seconds or 0.0) - predicted
    if not predicted:
        least = LEAST_CHANGE * run.predicted[STEP]
        return {}, "it was not predicted, so there is nothing to correct" if off > least else ""
    names = set(term.terms)
    if names <= {"compute", "recompute"}:
        return {f"device.compute.{_precision(cluster, run.plan.precision)}.*": predicted}, ""
    if names == {"optimizer"}:
        return {"device.memory_bytes_per_second": predicted * cluster.device.memory_bytes_per_second.value}, ""
    if names == {"loader"} and cluster.loader_bytes_per_second is not None:
        return {"loader_bytes_per_second": predicted * cluster.loader_bytes_per_second.value}, ""
    if names <= {"data", "codec"} and "data" in names:
        return {}, "" if has_buckets else "its buckets were not recorded one by one"
    if len(names) == 1 and names <= set(_OPERATIONS):
        return _of_operation(cluster, run, next(iter(names)), predicted)
    why = "" if names & {"bubble", "straggler"} else "no figure of the cluster stands for it alone"
    return {}, why


def _of_operation(cluster: Cluster, run: _Run, degree: str, predicted: float) -> tuple[dict[str, float], str]:
    tier = _tier(cluster, run.degrees, "pipeline" if degree == "transfer" else degree)
    there = [name for name in _OPERATIONS[degree] if name in cluster.tiers[tier].collectives]
    share = predicted / max(1, len(there))
    found = {f"tiers.{tier}.collectives.{name}.*": share for name in there}
    return found, "" if found else f"tier {cluster.tiers[tier].name} has no figures of {_OPERATIONS[degree][0]}"


def _tier(cluster: Cluster, degrees: Degrees, degree: str) -> int:
    """Return the place of the tier over which ranks of a degree reach each other."""
    strides = {
        "tensor": 1, "context": degrees.tensor, "expert": degrees.tensor * degrees.context,
        "pipeline": degrees.size // degrees.pipeline,
    }  # fmt: skip
    count = degrees.data * degrees.shard if degree in ("data", "shard") else getattr(degrees, degree)
    found = cluster.tier_of(max(2, count), strides.get(degree, degrees.tensor * degrees.context * degrees.expert))
    return next(place for place, tier in enumerate(cluster.tiers) if tier is found)


def _precision(cluster: Cluster, precision: str) -> str:
    names = (precision, *_INSTEAD.get(precision, ("fp32",)))
    return next((name for name in names if cluster.device.compute.get(name)), precision)


def _buckets(cluster: Cluster, run: _Run) -> list[Observation]:
    """Return the buckets without a codec, each by its own time on the wire: the median over a block of steps."""
    layouts = [layout for _, layout in run.timelines[0].layouts]
    if not layouts or not run.degrees.is_data_alone or run.plan.zero or len(run.timelines) < 2:
        return []
    layout, hosts = layouts[-1], {timeline.host for timeline in run.timelines}
    if layout.route == "hierarchical" and 1 < len(hosts) < len(run.timelines):
        run.notes.append(f"{run.name}: buckets travel inside hosts and between them: not told apart, left out")
        return []
    place = _tier(cluster, run.degrees, "data")
    path = f"tiers.{place}.collectives.all_reduce"
    if "all_reduce" not in cluster.tiers[place].collectives:
        return []
    figures_below(cluster, f"{path}.*")
    size = len(run.timelines)
    seconds = _bucket_seconds(run)
    found = []
    for number, facts in enumerate(layout.buckets):
        if facts.codec != NONE or not facts.nbytes:
            continue
        work = collective_work("all_reduce", size, facts.nbytes)
        features = {f"{path}.latency_seconds": float(work.rounds), f"{path}.bytes_per_second": work.sent_bytes}
        for block in _blocks([part.step for part in run.parts[0]]):
            times = [seconds[step][number] for step in block if number < len(seconds.get(step, ()))]
            if times and median(times) > 0:
                found.append(Observation(f"bucket {number} of {run.name}", median(times), features))
    return found


def _bucket_seconds(run: _Run) -> dict[int, list[float]]:
    """Return what each bucket of a step took once the one before had arrived; of steps with one exchange."""
    rows: dict[int, list[StepRow]] = rows_by_step([timeline.steps for timeline in run.timelines])
    one_clock = are_comparable(run.timelines)
    counted = {part.step for part in run.parts[0]}
    found = {}
    for step, own in rows.items():
        wires = wires_of(own, one_clock=one_clock) if step in counted and len(own) == len(run.timelines) else []
        if len(wires) == 1 and wires[0] is not None:
            found[step] = wires[0].serialized_seconds
    return found


def _speeds(cluster: Cluster, run: _Run) -> dict[int, float]:
    """Return the speed of ranks that compute more slowly than the others, where all compute alike."""
    if not run.degrees.is_data_alone or len(run.timelines) < 2:
        return {}
    computing = [mean([part.compute for part in own]) for own in run.parts]
    usual = median_low(computing)
    return {
        timeline.rank: usual / own
        for timeline, own in zip(run.timelines, computing, strict=True)
        if usual > 0 and own > _SLOWER * usual and timeline.rank < cluster.ranks
    }
