"""An answer after its best plans were run: the one that was fastest is the plan, whatever was predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from ...core.cluster.cluster import Cluster, with_ranks
from ...core.vocabulary.units import format_seconds
from ..candidate import Candidate
from ..cost.predict import predict
from ..model.profile import ModelProfile
from .decide import needs_of, stage_seconds, warnings_of_codec
from .in_words import in_words
from .reasons import changes_of, constraint_of, next_bottleneck, why_slower
from .result import PlanAnswer, PlanFamily, PredictedPlan, Tried, with_limit
from .search import Found, SearchQuestion

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
