"""What another link, limit or batch would change, and what would make a model fit.

Changes are looked at among the plans that the search has predicted: the best of every family, the next best ones,
and those that did not fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...core.cluster.cluster import Cluster
from ...core.cluster.resize import with_ranks
from ...core.vocabulary.errors import ConfigError, PlanError
from ...core.vocabulary.units import format_bytes
from ..candidate import Candidate
from ..model.profile import ModelProfile
from .other_clusters import with_faster_link, with_limit
from .result import PredictedPlan, WhatIf
from .search import Found, Predictor, SearchQuestion, choose, find, score

_POOL = 10
_LARGEST = 1000
"""Micro-batches times stages of a schedule that is simulated anew."""
_TIMES_THE_RANKS = (2, 4, 8, 16)
_EFFORT = 300
"""The effort of a search with another batch, or for what would make a model fit."""
_LEAN = ("1f1b", "zb-h1")
"""Schedules that keep no more activations when there are more micro-batches: what gpipe has no room for fits."""
_SMALL = 20_000
"""Layouts of a space that is searched again."""


def changes_of(question: SearchQuestion, found: Found, *, searches: bool = True) -> Iterator[WhatIf]:
    """Yield the best plan with a link twice as fast, with twice the memory and with twice the batch.

    `searches`: whether plans that are not in `found` are looked at for the batch, too.
    """
    profile, cluster, request, predict, limit_bytes = question
    best = found.best(request.goal)
    assert best is not None, "only an answer with a plan has changes"
    pool = _pool(found, request.goal)
    if request.ranks > 1:
        name = cluster.tiers[-1].name
        faster = with_faster_link(cluster, 2.0)
        options = _predicted(profile, faster, predict, pool)
        yield _change(f"a link twice as fast ({name})", options, best, request.goal, limit_bytes)
    twice = with_limit(cluster, 2 * limit_bytes)
    options = _predicted(profile, twice, predict, pool)
    yield _change(f"{format_bytes(2 * limit_bytes)} of memory", options, best, request.goal, 2 * limit_bytes)
    schedules = () if "schedule" in request.fixed else _LEAN
    more = [each for option in pool for each in _doubled(option, schedules)]
    options = _predicted(profile, cluster, predict, more)
    if searches and found.layouts <= _SMALL:
        doubled = replace(request, global_batch=2 * request.global_batch, effort=_EFFORT)
        options += _found(question._replace(request=doubled))
    yield _change(f"a global batch of {2 * request.global_batch}", options, best, request.goal, limit_bytes)


def ways_to_fit(question: SearchQuestion, found: Found) -> Iterator[str]:
    """Yield by how much a model does not fit, and what would make it fit."""
    limit_bytes = question.limit_bytes
    least = min(found.over, key=lambda each: each.prediction.peak_bytes, default=None)
    if least is None:
        yield f"no plan fits into {format_bytes(limit_bytes)}, and none could be predicted"
        return
    needed = least.prediction.peak_bytes
    yield (
        f"does not fit: the least is {format_bytes(needed)} on a rank ({least.family}), "
        f"{format_bytes(needed - limit_bytes)} more than {format_bytes(limit_bytes)}"
    )
    yield from _ways(question)


def _ways(question: SearchQuestion) -> Iterator[str]:
    cluster, request = question.cluster, question.request
    asked = replace(request, goal="memory", effort=_EFFORT)
    changed = [(f"{key} not fixed", replace(asked, fixed={k: v for k, v in request.fixed.items() if k != key}))
               for key in request.choices]  # fmt: skip
    if "precision" not in request.fixed and request.precisions == ("fp32",):
        changed.append(("precision bf16", replace(asked, precisions=("fp32", "bf16"))))
    for text, other in changed:
        option = _best_of(question._replace(request=other))
        if option is not None:
            yield f"it would fit with {text}: {format_bytes(option.prediction.peak_bytes)} ({option.family})"
    for factor in _TIMES_THE_RANKS:
        ranks = factor * request.ranks
        try:
            other = replace(asked, ranks=ranks, global_batch=request.global_batch * factor)
            larger = with_ranks(cluster, ranks)
        except (ConfigError, PlanError) as problem:  # such as more hosts, of which no network is known
            yield f"more ranks were not looked at: {problem.message}"
            return
        option = _best_of(question._replace(request=other, cluster=larger))
        if option is not None:
            needs = f"{format_bytes(option.prediction.peak_bytes)} ({option.family})"
            yield f"it would fit on {ranks} ranks with a global batch of {other.global_batch}: {needs}"
            return
    yield f"no plan was found that fits on {_TIMES_THE_RANKS[-1]} times the ranks"


def _found(question: SearchQuestion) -> list[PredictedPlan]:
    try:
        return find(question).options
    except PlanError:
        return []


def _best_of(question: SearchQuestion) -> PredictedPlan | None:
    try:
        return find(question).best("memory")
    except PlanError:
        return None


def _pool(found: Found, goal: str) -> list[PredictedPlan]:
    """Return the best plan of each family, the next best ones, and the best that do not fit."""
    every = [each for name in found.families if (each := found.best(goal, name)) is not None]
    of_families = sorted(every, key=lambda each: score(each, goal))[:_POOL]
    of_families += sorted(found.options, key=lambda each: score(each, goal))[:_POOL]
    of_families += sorted(found.over, key=lambda each: score(each, goal))[:_POOL]
    return list({id(each): each for each in of_families}.values())


def _doubled(option: PredictedPlan, schedules: Sequence[str]) -> Iterator[PredictedPlan]:
    """Yield a plan with twice the samples: in larger micro-batches, and in more of them, by `schedules` too."""
    candidate = option.candidate
    plan = candidate.plan
    yield replace(option, candidate=replace(candidate, global_batch=2 * candidate.global_batch))
    if plan.pipeline != 1 and int(plan.pipeline) * plan.micro_batches > _LARGEST:
        return
    key = "micro_batches" if plan.pipeline != 1 or plan.micro_batches > 1 else "accumulate"
    more = replace(plan, **{key: 2 * getattr(plan, key)})
    others = [name for name in schedules if plan.pipeline != 1 and name != plan.schedule]
    for way in (more, *(replace(more, schedule=name, chunks=0) for name in others)):
        yield replace(option, candidate=Candidate(way, candidate.ranks, 2 * candidate.global_batch))


def _predicted(
    profile: ModelProfile, cluster: Cluster, predict: Predictor, pool: list[PredictedPlan]
) -> list[PredictedPlan]:
    options = []
    for each in pool:
        try:
            options.append(replace(each, prediction=predict(profile, cluster, each.candidate)))
        except PlanError:  # such as a number of micro-batches that a schedule does not take
            continue
    return options


def _change(what: str, options: list[PredictedPlan], best: PredictedPlan, goal: str, limit_bytes: int) -> WhatIf:
    fitting = [each for each in options if each.prediction.peak_bytes <= limit_bytes]
    if not fitting:
        return WhatIf(what, None, 0.0, is_other_plan=False)
    per_sample = {id(each): score(each, goal)[0] / (each.candidate.global_batch if goal != "memory" else 1)
                  for each in fitting}  # fmt: skip
    then = choose(fitting, goal, lambda each: per_sample[id(each)])
    gain = then.samples_per_second / best.samples_per_second - 1
    return WhatIf(what, then, gain, is_other_plan=then.candidate.plan != best.candidate.plan)
