"""Why a plan lost, in a line with the number that killed it; and what keeps the best one from being better."""

from __future__ import annotations

from ...core.vocabulary.units import format_bytes, format_seconds, format_share
from ..candidate import Prediction, Term
from ..memory import MemoryByCategory
from .result import PredictedPlan
from .search import NEAR, Found, score, simple

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
