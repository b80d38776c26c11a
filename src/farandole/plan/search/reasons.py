"""Why a plan lost, in a line with the number that killed it; and what keeps the best one from being better."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ...core.cluster import Cluster, with_ranks
from ...core.vocabulary.codec_spec import NONE
from ...core.vocabulary.degrees import ORDER
from ...core.vocabulary.errors import ConfigError, PlanError
from ...core.vocabulary.rules import broken
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.units import format_bytes, format_seconds, format_share
from ..candidate import Candidate, Prediction, Term
from ..memory import MemoryByCategory
from ..profile import ModelProfile
from .refine import micro_batch_of, passes_of
from .result import PredictedPlan, WhatIf, with_faster_link, with_limit
from .search import NEAR, Found, Predictor, SearchQuestion, choose, find, score, simple

CATEGORIES = ("weights", "gradients", "optimizer", "activations", "temporary")
WORDS: dict[Term, str] = {
    "compute": "computation",
    "recompute": "recomputation",
    "optimizer": "the optimizer's step",
    "data": "exchange of gradients",
    "shard": "exchange of shards",
    "tensor": "sums of divided layers",
    "context": "exchange of keys and values",
    "expert": "tokens to experts",
    "transfer": "transfers between stages",
    "bubble": "pipeline bubble",
    "codec": "codec",
    "loader": "loading",
    "straggler": "waiting for slow ranks",
}
_ENOUGH = 0.005
"""A gain of less is not worth a word."""


def why_slower(option: PredictedPlan, best: PredictedPlan, goal: str) -> str:
    """Return why `option` is worse than `best` by a goal, with the number."""
    mine, theirs = option.prediction, best.prediction
    if goal == "memory":
        return _why_larger(mine, theirs)
    gain = 1 - score(option, goal)[0] / score(best, goal)[0]
    if gain > 0 and simple(option.candidate) > simple(best.candidate):
        return _why_not_simpler(option, best, gain, goal)
    if goal == "cost" and option.candidate.ranks != best.candidate.ranks:
        more = score(option, goal)[0] / score(best, goal)[0] - 1
        return f"{format_share(more)} more rank-seconds, on {option.candidate.ranks} ranks"
    late = mine.seconds - theirs.seconds
    if late <= 0:
        return "as fast, and takes more memory or more keys"
    name = max(mine.terms, key=lambda term: mine.terms[term] - theirs.terms.get(term, 0.0))
    before = theirs.terms.get(name, 0.0)
    than = f" against {format_seconds(before)}" if before > 0 else ""
    return (
        f"{format_seconds(late)} slower ({format_share(late / theirs.seconds)}): {WORDS[name]} "
        f"{format_seconds(mine.terms[name])}{than}"
    )


def _why_not_simpler(option: PredictedPlan, best: PredictedPlan, gain: float, goal: str) -> str:
    """Return what a plan that is better needs beside the chosen one: see [Note: the simplest of near ones]."""
    what = "cheaper" if goal == "cost" else "faster"
    if option.candidate.script_changes > best.candidate.script_changes:
        left = f"within {NEAR:.0%} that plan is chosen which changes least in it"
        return f"{format_share(gain)} {what}, and the script must be changed for it: {left}"
    names = [name for name in option.family.split(" x ") if name not in best.family.split(" x ")]
    more = f"needs {' and '.join(names)}, too" if names else "has more kinds of parallelism"
    return f"{format_share(gain)} {what}, and {more}: within {NEAR:.0%} the fewest kinds are chosen"


def _why_larger(mine: Prediction, theirs: Prediction) -> str:
    more = mine.peak_bytes - theirs.peak_bytes
    if more <= 0:
        return "as small, and slower"
    here, there = largest_stage(mine), largest_stage(theirs)
    name = max(CATEGORIES, key=lambda each: _category(here, each) - _category(there, each))
    return (
        f"{format_bytes(more)} more: {name} {format_bytes(_category(here, name))} against "
        f"{format_bytes(_category(there, name))}"
    )


def why_it_does_not_fit(prediction: Prediction, limit_bytes: int) -> str:
    """Return by how much a plan is over the limit, and by which category."""
    memory = largest_stage(prediction)
    name = max(CATEGORIES, key=lambda each: _category(memory, each))
    return (
        f"{format_bytes(prediction.peak_bytes)} at the least, {format_bytes(prediction.peak_bytes - limit_bytes)} "
        f"over: {name} {format_bytes(_category(memory, name))}"
    )


def largest_stage(prediction: Prediction) -> MemoryByCategory:
    """Return the memory of the stage that needs most."""
    return max(prediction.memory, key=lambda each: each.total_bytes)


def _category(memory: MemoryByCategory, name: str) -> int:
    return getattr(memory, f"{name}_bytes") or 0


def constraint_of(best: PredictedPlan, found: Found, goal: str, limit_bytes: int) -> str:
    """Return what binds: the limit of memory, if a plan over it is better; else the largest part of a step."""
    faster = [each for each in found.over if score(each, goal) < score(best, goal)]
    if faster and goal != "memory":
        other = min(faster, key=lambda each: score(each, goal))
        gain = 1 - score(other, goal)[0] / score(best, goal)[0]
        if gain > _ENOUGH:
            return (
                f"memory: without the limit of {format_bytes(limit_bytes)} {other.family} would be "
                f"{format_share(gain)} better, with {format_bytes(other.prediction.peak_bytes)}"
            )
    if goal == "memory":
        memory = largest_stage(best.prediction)
        name = max(CATEGORIES, key=lambda each: _category(memory, each))
        return f"{name}: {format_bytes(_category(memory, name))} of {format_bytes(best.prediction.peak_bytes)}"
    return largest_part(best.prediction)


def largest_part(prediction: Prediction) -> str:
    """Return the part of a step that takes longest, with its share."""
    return _part(prediction, 0)


def next_bottleneck(best: PredictedPlan) -> str:
    """Return the largest part of a step beside computation, or the second if computation is not the largest."""
    terms = _ordered(best.prediction)
    if terms and terms[0] != "compute":
        return _part(best.prediction, 1)
    others = [term for term in terms if term != "compute"]
    if not others:
        return "none: all of the step is computation"
    return _text(best.prediction, others[0])


def _ordered(prediction: Prediction) -> list[Term]:
    known = [term for term, seconds in prediction.terms.items() if seconds > 0]
    return sorted(known, key=lambda term: -prediction.terms[term])


def _part(prediction: Prediction, place: int) -> str:
    terms = _ordered(prediction)
    return _text(prediction, terms[place]) if place < len(terms) else "none"


def _text(prediction: Prediction, term: Term) -> str:
    seconds = prediction.terms[term]
    return f"{WORDS[term]}: {format_seconds(seconds)}, {format_share(seconds / prediction.seconds)} of the step"


# What another link, limit or batch would change, and what would make a model fit.
#
# Changes are looked at among the plans that the search has predicted: the best of every family, the next best
# ones, and those that did not fit.

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
    others: list[dict[str, Any]] = [
        {"schedule": name, "chunks": 0} for name in schedules if plan.pipeline != 1 and name != plan.schedule
    ]
    for keys in ({}, *others):
        if broken({**vars(more), **keys}) is None:
            way = replace(more, **keys)
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


# A plan in one line.


def in_words(candidate: Candidate) -> str:
    """Return what a plan does, such as ``data 2 x tensor 4, ZeRO-1, 2 x 8 samples, fp32``."""
    plan = candidate.plan
    degrees = [f"{name} {getattr(plan, name)}" for name in ORDER if getattr(plan, name) != 1]
    words = [" x ".join(degrees) or "one rank"]
    if plan.sequence_parallel:
        words.append("tokens divided")
    if plan.zero:
        words.append(f"ZeRO-{plan.zero}")
    if plan.pipeline != 1:
        words.append(plan.schedule + (f" with {plan.chunks} stages a rank" if plan.chunks else ""))
    words.append(f"{passes_of(candidate)} x {micro_batch_of(candidate)} samples a rank")
    words.append("bf16 parameters" if plan.bf16_parameters else plan.precision)
    if isinstance(plan.recompute, tuple):
        words.append(f"{len(plan.recompute)} modules recomputed")
    elif plan.recompute != Plan.recompute:
        words.append(f"{plan.recompute} recomputed")
    if plan.codec != NONE:
        words.append(f"codec {plan.codec}")
    if plan.bucket_bytes:
        words.append(f"buckets of {plan.bucket_bytes / 2**20:g} MiB")
    if plan.route != "auto":
        words.append(f"route {plan.route}")
    return ", ".join(words)
