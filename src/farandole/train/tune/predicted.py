"""The settings that the step model holds for best, from what was measured of the job. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from ...comm.autotune.choice import FASTEST_SLACK, assign_codecs
from ...comm.autotune.look import Look
from ...core.step_model.bucket_plan import BucketPlan, ExchangeKeys
from ...core.step_model.prediction import CANDIDATES, StepProfile, buckets_of, predict_step
from ...core.vocabulary.codec_spec import NONE
from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.spec import Plan

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
