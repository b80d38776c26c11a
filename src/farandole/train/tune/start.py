"""How a tuner begins: what was measured of the job, what the step model says, and what earlier runs found."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial

from ...comm.autotune.choice import FASTEST_SLACK, assign_codecs
from ...comm.autotune.look import Look
from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...core.environ.tune_settings import TuneSettings
from ...core.step_model.bucket_plan import BucketPlan, ExchangeKeys
from ...core.step_model.prediction import CANDIDATES, StepProfile, buckets_of, predict_step
from ...core.vocabulary.codec_spec import NONE, CodecSpec
from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.spec import Plan
from .decision import TuneDecision, TuneLimits
from .history import TuneHistory, facts_of
from .outcome import TuningRecord
from .search import PatternSearch, bucket_grid
from .switching import ExchangeSwitch


def begin_decision(
    here: World, switch: ExchangeSwitch, settings: TuneSettings, limits: TuneLimits
) -> TuningRecord:
    """Measure what predictions need; return what rank 0 decides with. Called by all ranks between two steps."""
    outcome = TuningRecord(switch.plan)
    is_lossy = settings.allow_lossy or not CodecSpec.parse(switch.keys.codec).is_exact
    look = switch.main.look(lossy=is_lossy)
    outcome.facts = facts_of(here, switch)
    batches = switch.micro_batches
    divisions = all_gather_json(
        here, "tuning/micro-batches", [switch.problem, 1 if batches is None else batches.least_samples]
    )
    if here.rank:
        return outcome
    names = _open_names(switch, settings)
    problems = [f"{problem} (rank {rank})" for rank, (problem, _) in enumerate(divisions) if problem]
    if problems and "micro_batches" in names:
        names.remove("micro_batches")
        outcome.notes.append(f"micro_batches stay as they are: {problems[0]}")
    sizes = bucket_grid(sum(switch.main.bucket_bytes))
    ranked: list[ExchangeKeys] = []
    if look is None:
        outcome.notes.append("the link was not measured: sizes are tried without a prediction")
    else:
        ranked, refused = rank_by_prediction(
            look, switch.keys, switch.plan, names, sizes, lossy=settings.allow_lossy
        )
        outcome.notes += refused
    search = outcome.search = PatternSearch(ranked, sizes, names, partial(layout_of, look))
    search.most_micro_batches = min(samples for _, samples in divisions)
    if look is not None and switch.keys.route in look.links:
        rate = look.links[switch.keys.route].bytes_per_second
        outcome.link_bytes_per_second = rate if math.isfinite(rate) else None
    if settings.cache:
        outcome.history = TuneHistory(outcome.facts["fingerprint"])
        earlier = outcome.history.find(outcome.link_bytes_per_second)
        if earlier is not None and _may_be(earlier[0], switch, names):
            search.predicted, search.is_settled = [earlier[0], *ranked], earlier[1]
            outcome.notes.append(
                f"an earlier run found {earlier[0].to_text()}: tried first (--no-cache: search anew)"
            )
    outcome.decision = TuneDecision(switch.keys, search, limits)
    return outcome


def _open_names(switch: ExchangeSwitch, settings: TuneSettings) -> list[str]:
    """Return the keys that may change: a route and a number of connections that the plan asks for stay."""
    asked = {"route": switch.plan.route != "auto", "connections": switch.plan.connections != 1}
    return [name for name in settings.names if not asked.get(name, False)]


def _may_be(keys: ExchangeKeys, switch: ExchangeSwitch, names: Sequence[str]) -> bool:
    """Return whether what an earlier run found may be tried in this one."""
    now = switch.keys.to_mapping()
    if any(value != now[name] and name not in names for name, value in keys.to_mapping().items()):
        return False
    try:
        keys.on(switch.plan)
    except PlanError:
        return False
    return keys.route in switch.main.parts.routes


# The settings that the step model holds for best, from what was measured of the job. Pure.


_MIB = 2**20
_WORTH_A_TRIAL = 1.1
"""A route or codec is not tried if its best step is predicted this many times as long as the present one."""
_APART = 4
"""Factor between the bucket sizes of one route and codec that are both tried: nearer ones are searched later."""


def predicted_seconds(look: Look, keys: ExchangeKeys) -> float:
    """Return what a step takes by `keys`, as the step model says."""
    profile = look.profiles[keys.route]
    return predict_step(profile, look.links[keys.route], _bucket_plan(profile, keys)).seconds


def layout_of(look: Look | None, keys: ExchangeKeys) -> Hashable:
    """Return what is the same for settings that exchange the same buckets in the same way."""
    if look is None:
        return keys
    profile = look.profiles[keys.route]
    buckets = buckets_of(profile, _bucket_plan(profile, keys))
    return keys.route, keys.codec, keys.connections, keys.micro_batches, tuple(len(bucket) for bucket in buckets)


def rank_by_prediction(
    look: Look, now: ExchangeKeys, plan: Plan, names: Sequence[str], sizes: Sequence[int], *, lossy: bool
) -> tuple[list[ExchangeKeys], list[str]]:
    """Return the settings to try, the best first, and why some are none.

    Args:
        look: what was measured.
        now: the setting in force.
        plan: the plan of the job.
        names: keys that may change.
        sizes: bucket sizes to choose from, in bytes.
        lossy: whether codecs that lose precision may be tried.
    """
    groups: list[list[tuple[float, ExchangeKeys]]] = []
    refused: list[str] = []
    for route in look.profiles if "route" in names else [now.route]:
        codecs = CANDIDATES if lossy and "codec" in names else (now.codec,)
        fastest = float("inf")  # of the gentler codecs on this route
        for codec in codecs:
            like = replace(now, route=route, codec=codec)  # type: ignore[arg-type]
            try:
                like.on(plan)
            except PlanError as problem:
                refused.append(problem.message)
                continue
            group = _group(look, like, names, sizes)
            if group and group[0][0] * FASTEST_SLACK < fastest:
                fastest = group[0][0]
                groups.append(group)
    is_known = now.codec in look.profiles[now.route].speeds
    limit = _WORTH_A_TRIAL * predicted_seconds(look, now) if is_known else float("inf")
    groups = sorted((each for each in groups if each[0][0] <= limit), key=lambda group: group[0][0])
    ranked = [group[0][1] for group in groups]
    for _, keys in groups[0] if groups else []:
        if all(not _is_near(keys, other) for other in ranked if other.codec == keys.codec):
            ranked.append(keys)
    return ranked, refused


def _group(
    look: Look, like: ExchangeKeys, names: Sequence[str], sizes: Sequence[int]
) -> list[tuple[float, ExchangeKeys]]:
    """Return the settings of one route and codec with what is predicted for them, the best first."""
    profile = look.profiles[like.route]
    if like.codec not in profile.speeds:
        return []
    if like.codec != NONE and set(assign_codecs(profile, like.codec).values()) == {NONE}:
        return []
    found = []
    for size in sizes if "bucket_bytes" in names else [like.bucket_bytes]:
        firsts = {min(_MIB, size), size} if "first_bucket_bytes" in names else {like.first_bucket_bytes}
        for first in sorted(firsts):
            keys = replace(like, bucket_bytes=size, first_bucket_bytes=first)
            found.append((predicted_seconds(look, keys), keys))
    return sorted(found, key=lambda each: each[0])


def _is_near(one: ExchangeKeys, other: ExchangeKeys) -> bool:
    return 1 / _APART < one.bucket_bytes / other.bucket_bytes < _APART


def _bucket_plan(profile: StepProfile, keys: ExchangeKeys) -> BucketPlan:
    codecs = {} if keys.codec == NONE else assign_codecs(profile, keys.codec)
    return BucketPlan(codecs, keys.bucket_bytes, keys.first_bucket_bytes)
