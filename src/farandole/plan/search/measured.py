"""An answer after its best plans were run: the one that was fastest is the plan, whatever was predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...core.cluster.cluster import Cluster
from ...core.vocabulary.units import format_seconds
from ..candidate import Candidate
from ..model.profile import ModelProfile
from .decide import needs_of, stage_seconds
from .in_words import in_words
from .reasons import largest_part, next_bottleneck
from .result import PlanAnswer, PlanFamily, PredictedPlan, Tried

Measured = tuple[Candidate, float | None, str]
"""A plan that was run, the seconds of a step (None: it failed), and what happened."""


def to_try(answer: PlanAnswer, count: int) -> list[PredictedPlan]:
    """Return the best plans of `count` kinds, the chosen one first."""
    fitting = [each.option for each in answer.families if each.status in ("chosen", "slower")]
    return [option for option in fitting if option is not None][:count]


def with_trials(
    answer: PlanAnswer, measured: Sequence[Measured], profile: ModelProfile, cluster: Cluster
) -> PlanAnswer:
    """Return the answer ranked by what was measured. Where every trial failed the prediction stays."""
    options = {id(each.candidate): each for each in _options(answer)}
    tried = [(options[id(candidate)], seconds, outcome) for candidate, seconds, outcome in measured]
    rows = tuple(
        Tried(in_words(option.candidate), option.prediction.seconds, seconds, outcome)
        for option, seconds, outcome in tried
    )
    answer = replace(answer, trials=rows)
    worked = [(seconds, option) for option, seconds, _ in tried if seconds is not None]
    if not worked:
        said = "no trial worked: the plan is the one that is predicted to be best"
        return replace(answer, warnings=(*answer.warnings, said))
    fastest, best = min(worked, key=lambda each: each[0])
    seconds_of = {option.family: seconds for seconds, option in worked}
    families = [_again(each, best, seconds_of, fastest) for each in answer.families]
    families.sort(key=lambda each: each.status != "chosen")
    if answer.best is not None and best.candidate == answer.best.candidate:
        return replace(answer, families=tuple(families))
    return replace(
        answer,
        best=best,
        families=tuple(families),
        constraint=largest_part(best.prediction),
        next_bottleneck=next_bottleneck(best),
        needs=tuple(needs_of(best)),
        stage_seconds=tuple(stage_seconds(profile, cluster, best, answer.limit_bytes)),
    )


def _options(answer: PlanAnswer) -> list[PredictedPlan]:
    return [each.option for each in answer.families if each.option is not None]


def _again(family: PlanFamily, best: PredictedPlan, seconds_of: dict[str, float], fastest: float) -> PlanFamily:
    if family.option is best:
        return replace(family, status="chosen", reason="")
    if family.name in seconds_of:
        seconds = seconds_of[family.name]
        said = f"measured: {format_seconds(seconds)}, {format_seconds(seconds - fastest)} slower"
        return replace(family, status="slower", reason=said)
    if family.status == "chosen":
        return replace(family, status="slower", reason="its trial failed")
    return family
