"""From what was predicted to an answer: the best plan, and why no other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from ...core.cluster import Cluster, with_ranks
from ...core.step_model import CANDIDATES
from ...core.vocabulary.units import format_seconds
from ..candidate import Candidate
from ..cost.predict import predict
from ..cost.predict import predict as predict_fully
from ..cost.stages import short_schedule
from ..profile import ModelProfile
from .reasons import (
    changes_of,
    constraint_of,
    in_words,
    next_bottleneck,
    ways_to_fit,
    why_it_does_not_fit,
    why_slower,
)
from .refine import best_cuts, layers_of_plan, micro_batch_of, passes_of
from .result import (
    DrawnPlan,
    PlanAnswer,
    PlanFamily,
    PredictedPlan,
    SearchRequest,
    Tried,
    ranks_per_host,
    with_limit,
)
from .search import Found, Predictor, SearchQuestion, find, score
from .space import fixed_is_lossy, is_lossy

LONG_STEP_SECONDS = 600.0
MUCH_FASTER = 1.5
"""A precision with so many times the rate is worth a word."""
MOST_DRAWN = 400
"""Plans of the drawing beside the frontier."""
_SIMPLE = ("tensor", "pipeline", "expert", "context")


def search(
    profile: ModelProfile,
    cluster: Cluster,
    request: SearchRequest,
    predict: Predictor = predict_fully,
    *,
    screen: Predictor | None = None,
) -> PlanAnswer:
    """Return the best plan of a model on a cluster, with the reasons.

    Args:
        profile: the model.
        cluster: the machines. With another number of ranks than the request's, its outermost tier is resized.
        request: what is asked for.
        predict: what a plan takes and holds.
        screen: the same without intervals, for the many that are compared; None: `predict`.

    Raises:
        ConfigError: the ranks do not fill hosts of the cluster.
        PlanError: no plan could run, whatever the memory. A model that fits nowhere is an answer without a plan.
    """
    measured = cluster
    limit_bytes = request.memory_bytes or round(cluster.device.memory_bytes.value)
    cluster = with_limit(with_ranks(cluster, request.ranks), limit_bytes)
    screen = screen or (partial(predict_fully, interval=False) if predict is predict_fully else predict)
    question = SearchQuestion(profile, cluster, request, screen, limit_bytes)
    found = find(question)
    best = found.best(request.goal)

    whole = best and replace(best, prediction=predict(profile, cluster, best.candidate))
    families = families_of(found, request.goal, limit_bytes)
    answer = PlanAnswer(
        request=request,
        model=profile.name,
        cluster=cluster.name,
        ranks_per_host=ranks_per_host(cluster),
        limit_bytes=limit_bytes,
        best=whole,
        families=tuple(replace(each, option=whole) if each.option is best else each for each in families),
        frontier=tuple(whole if each is best and whole else each for each in frontier_of(found.options)),
        points=_drawn(found),
        counts={
            "layouts": found.layouts, "too large": found.too_large, "beaten": found.beaten,
            "predicted": found.predicted, "left": found.left,
        },
    )  # fmt: skip
    warnings = _warnings(profile, request, found, answer.best, measured)
    if best is None:
        return replace(answer, advice=tuple(ways_to_fit(question, found)), warnings=tuple(warnings))
    return replace(
        answer,
        constraint=constraint_of(best, found, request.goal, limit_bytes),
        next_bottleneck=next_bottleneck(best),
        changes=tuple(changes_of(question, found)),
        needs=tuple(needs_of(best)),
        warnings=tuple(warnings),
        stage_seconds=tuple(stage_seconds(profile, cluster, best, limit_bytes)),
    )


def families_of(found: Found, goal: str, limit_bytes: int) -> tuple[PlanFamily, ...]:
    """Return every kind of plan with the best of it: the chosen one, slower ones, what does not fit, the rest."""
    best = found.best(goal)
    families = [_family(found, name, best, goal, limit_bytes) for name in found.families]
    never = {name for name in _SIMPLE if _never(found, name)}
    kept = [each for each in families if each.option is not None or not never.intersection(each.name.split(" x "))]
    kept += [PlanFamily(name, "impossible", None, _reason_of(found, name)) for name in sorted(never)]
    order = ["chosen", "slower", "does not fit", "impossible"]

    def place(each: PlanFamily) -> tuple[int, float, str]:
        value = score(each.option, goal if each.status != "does not fit" else "memory")[0] if each.option else 0.0
        return order.index(each.status), value, each.name

    return tuple(sorted(kept, key=place))


def _family(found: Found, name: str, best: PredictedPlan | None, goal: str, limit_bytes: int) -> PlanFamily:
    mine = found.best(goal, name)
    if best is not None and best.family == name:
        return PlanFamily(name, "chosen", best, "")
    if mine is not None and best is not None:
        return PlanFamily(name, "slower", mine, why_slower(mine, best, goal))
    over = [each for each in found.over if each.family == name]
    if over:
        least = min(over, key=lambda each: each.prediction.peak_bytes)
        return PlanFamily(name, "does not fit", least, why_it_does_not_fit(least.prediction, limit_bytes))
    return PlanFamily(
        name, "impossible", None, found.families[name] or "its plans are no better than others by far"
    )


def _never(found: Found, degree: str) -> bool:
    """Whether every family with `degree` is impossible."""
    having = [name for name in found.families if degree in name.split(" x ")]
    known = {each.family for each in (*found.options, *found.over)}
    return bool(having) and not known.intersection(having)


def _reason_of(found: Found, degree: str) -> str:
    having = [name for name in found.families if degree in name.split(" x ") and found.families[name]]
    return found.families[min(having, key=len)] if having else "no plan has it"


def frontier_of(options: Sequence[PredictedPlan]) -> tuple[PredictedPlan, ...]:
    """Return the plans that no other beats in both memory and time, from the least memory on."""
    kept: list[PredictedPlan] = []
    for each in sorted(options, key=lambda one: (one.prediction.peak_bytes, one.prediction.seconds)):
        if not kept or each.prediction.seconds < kept[-1].prediction.seconds:
            kept.append(each)
    return tuple(kept)


def needs_of(best: PredictedPlan) -> list[str]:
    """Return what the training script must do for a plan."""
    candidate = best.candidate
    plan, samples, passes = candidate.plan, micro_batch_of(candidate), passes_of(candidate)
    lines = []
    if plan.pipeline != 1 or plan.micro_batches > 1:
        parts = f"{passes} micro-batches of {samples}" if passes > 1 else "one micro-batch"
        lines.append(f"call fd.step with {samples * passes} samples on each rank: {parts}")
    elif passes > 1:
        lines.append(
            f"load {samples} samples a rank, divide the loss by {passes}, and step after {passes} backward passes"
        )
    else:
        lines.append(f"load {samples} sample{'s' * (samples > 1)} on each rank")
    if plan.context != 1:
        lines.append("cut sequences by fd.context_shard before the model is called (docs/fit/one-model.md)")
    return lines


def stage_seconds(
    profile: ModelProfile, cluster: Cluster, best: PredictedPlan, limit_bytes: int
) -> list[tuple[float, float]]:
    """Return the seconds of forward and backward of each stage with one micro-batch; empty without a pipeline."""
    plan = best.candidate.plan
    if plan.pipeline == 1:
        return []
    layers = layers_of_plan(profile, cluster, best.candidate)
    names = [each.name for each in layers]
    schedule = short_schedule(plan.schedule, int(plan.pipeline), passes_of(best.candidate), plan.chunks).schedule
    cuts: Sequence[int] | None = None
    if plan.pipeline_cuts and all(each in names for each in plan.pipeline_cuts):
        cuts = [names.index(each) for each in plan.pipeline_cuts]
    cuts = cuts or best_cuts(layers, best.candidate, limit_bytes) or best_cuts(layers, best.candidate, 2**62)
    if cuts is None:
        return []
    ends = [0, *cuts, len(layers)]
    assert len(ends) == schedule.stages + 1, f"{len(ends) - 1} stages of {schedule.stages}"
    return [
        (sum(each.forward_seconds for each in layers[ends[i] : ends[i + 1]]),
         sum(each.backward_seconds for each in layers[ends[i] : ends[i + 1]]))
        for i in range(schedule.stages)
    ]  # fmt: skip


def _warnings(
    profile: ModelProfile, request: SearchRequest, found: Found, best: PredictedPlan | None, cluster: Cluster
) -> list[str]:
    lines: list[str] = []
    if request.ranks > cluster.ranks:
        lines.append(
            f"extrapolated: the cluster's figures are of {cluster.ranks} ranks, and there are {request.ranks}"
        )
    if best is not None:
        lines += best.prediction.warnings
    lines += profile.notes
    if best is not None:
        lines += _of_precision(request, cluster)
        if best.prediction.seconds > LONG_STEP_SECONDS:
            lines.append(
                f"a step of {format_seconds(best.prediction.seconds)} is unusual: a global batch counts samples, "
                "which are sequences for a language model, not tokens"
            )
        lines += warnings_of_codec(best, request, cluster)
    if found.left:
        lines.append(
            f"{found.left} of {found.layouts} layouts were not predicted, the least promising ones (--effort)"
        )
    return list(dict.fromkeys(lines))


def _of_precision(request: SearchRequest, cluster: Cluster) -> list[str]:
    """Return that bf16 would be faster, where nothing but fp32 was looked at by default."""
    rates = {name: max(each.flops_per_second.value for each in of) for name, of in cluster.device.compute.items()}
    is_asked = "precision" in request.fixed or request.precisions != ("fp32",)
    if is_asked or not {"fp32", "bf16"} <= set(rates):
        return []
    factor = rates["bf16"] / rates["fp32"]
    said = f"planned in fp32: {cluster.device.name} is {factor:.1f} times as fast in bf16 (--precision fp32,bf16)"
    return [said] if factor > MUCH_FASTER else []


def warnings_of_codec(best: PredictedPlan, request: SearchRequest, cluster: Cluster) -> list[str]:
    """Return what is to be said of a plan's codec: that it is lossy, or that lossy ones were not looked at."""
    if is_lossy(best.candidate.plan):
        if fixed_is_lossy(request.fixed):
            return []
        named = [f'{key} "{codec}"' for key, codec in best.candidate.plan.lossy_keys().items()]
        return [f"{' and '.join(named)} loses something in every step (docs/fast/slow-networks.md)"]
    if not any(map(cluster.knows_codec, CANDIDATES[1:])):
        return ["lossy codecs were not considered (how fast they are here was not measured: farandole measure)"]
    return [] if request.allow_lossy else ["lossy codecs were not considered (--allow-lossy)"]


def _drawn(found: Found) -> tuple[DrawnPlan, ...]:
    every = [*found.options, *found.over]
    every.sort(key=lambda each: each.prediction.seconds)
    step = max(1, len(every) // MOST_DRAWN)
    return tuple(
        DrawnPlan(in_words(each.candidate), each.prediction.seconds, each.prediction.peak_bytes)
        for each in every[::step][:MOST_DRAWN]
    )


# An answer after its best plans were run: the one that was fastest is the plan, whatever was predicted.


Measured = tuple[Candidate, float | None, str]
"""A plan that was run, the seconds of a step (None: it failed), and what happened."""


def to_try(answer: PlanAnswer, count: int) -> list[PredictedPlan]:
    """Return the best plans of `count` kinds, the chosen one first."""
    fitting = [each.option for each in answer.families if each.status in ("chosen", "slower")]
    return [option for option in fitting if option is not None][:count]


def with_trials(
    answer: PlanAnswer, measured: Sequence[Measured], profile: ModelProfile, cluster: Cluster
) -> PlanAnswer:
    """Return the answer ranked by what was measured. Where every trial failed the prediction stays.

    What is said of the plan that won is made anew, and no number of the plan that lost is left in it: its
    interval, why the other kinds lost, and what would change, which is of this plan alone.
    """
    options = {id(each.option.candidate): each.option for each in answer.families if each.option is not None}
    tried = [(options[id(candidate)], seconds, outcome) for candidate, seconds, outcome in measured]
    rows = tuple(
        Tried(in_words(option.candidate), option.prediction.seconds, seconds, outcome)
        for option, seconds, outcome in tried
    )
    answer = replace(answer, trials=rows)
    worked = {option.family: (seconds, option) for option, seconds, _ in tried if seconds is not None}
    if not worked:
        said = "no trial worked: the plan is the one that is predicted to be best"
        return replace(answer, warnings=(*answer.warnings, said))
    request = answer.request
    goal, limit_bytes = request.goal, answer.limit_bytes
    _, best = min(worked.values(), key=lambda each: _score(each[0], each[1], goal))
    is_same = answer.best is not None and best.candidate == answer.best.candidate
    sized = with_limit(with_ranks(cluster, request.ranks), limit_bytes)
    whole = best if is_same else replace(best, prediction=predict(profile, sized, best.candidate))
    families = [_again(each, best, whole, worked, goal) for each in answer.families]
    families.sort(key=lambda each: each.status != "chosen")
    if is_same:
        return replace(answer, families=tuple(families))
    question = SearchQuestion(profile, sized, request, partial(predict, interval=False), limit_bytes)
    alone = Found(options=[whole], families={whole.family: ""})
    before, after = (
        [*each.prediction.warnings, *warnings_of_codec(each, request, sized)] if each is not None else []
        for each in (answer.best, whole)
    )
    return replace(
        answer,
        best=whole,
        families=tuple(families),
        frontier=tuple(whole if each.candidate == whole.candidate else each for each in answer.frontier),
        constraint=constraint_of(whole, Found(), goal, limit_bytes),
        next_bottleneck=next_bottleneck(whole),
        changes=tuple(changes_of(question, alone, searches=False)),
        needs=tuple(needs_of(whole)),
        warnings=tuple(dict.fromkeys([*after, *(each for each in answer.warnings if each not in before)])),
        stage_seconds=tuple(stage_seconds(profile, sized, whole, limit_bytes)),
    )


def _score(seconds: float, option: PredictedPlan, goal: str) -> tuple[float, float]:
    """Return what a goal makes smallest, by the measured seconds. Memory is the predicted one: it fitted."""
    first = {"memory": option.prediction.peak_bytes, "cost": option.candidate.ranks * seconds}.get(goal, seconds)
    return first, seconds


def _again(
    family: PlanFamily,
    best: PredictedPlan,
    whole: PredictedPlan,
    worked: Mapping[str, tuple[float, PredictedPlan]],
    goal: str,
) -> PlanFamily:
    if family.option is best:
        return replace(family, status="chosen", option=whole, reason="")
    if family.name in worked:
        seconds, least = worked[family.name][0], worked[best.family][0]
        late = f"{format_seconds(abs(seconds - least))} {'slower' if seconds >= least else 'faster'}"
        more = {"memory": ", with more memory", "cost": ", for more rank-seconds"}.get(goal, "")
        said = f"measured: {format_seconds(seconds)}, {late}{more}"
        return replace(family, status="slower", reason=said)
    if family.status == "chosen":
        return replace(family, status="slower", reason="its trial failed")
    if family.status == "slower" and family.option is not None:
        return replace(family, reason=why_slower(family.option, whole, goal))
    return family
