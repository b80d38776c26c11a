"""What a plan cannot combine, whatever the model: the one home of these rules.

`farandole.parallel.mesh` asks before anything is sent, and the planner before it proposes a plan. What one key
contradicts in another is in `core.vocabulary`; what a model or an optimizer refuses is said where it is applied.
"""

from __future__ import annotations

from typing import Final

from ..core.vocabulary.codec_spec import AUTO, NONE, CodecSpec
from ..core.vocabulary.degrees import Degrees
from ..core.vocabulary.errors import PlanError
from ..core.vocabulary.spec import MOST_ZERO, Plan

NOT_TOGETHER: Final = (
    ("pipeline", "precision", ("fp16",), 'precision = "bf16"'),
    ("expert", "precision", ("fp16",), 'precision = "bf16"'),
    ("expert", "zero", (1, 2), "zero = 3, or zero = 0"),
)
"""(degree above 1, key, its values, the nearest thing that can)."""


def lossy_keys(plan: Plan) -> dict[str, str]:
    """Return which keys of `plan` make what ranks exchange lossy in every step, at any stage, with their codecs.

    The permission `lossy` is none of them: what codec "auto" chooses by it is decided in the training.
    """
    codecs = [plan.codec, *plan.codec_for.values()]
    applied = dict.fromkeys(each for each in codecs if CodecSpec.parse(each).is_applied)
    named = {"codec": ", ".join(applied), "weight_codec": plan.weight_codec, "expert_codec": plan.expert_codec}
    return {name: text for name, text in named.items() if text not in ("", NONE)}


def refuse_combinations(plan: Plan, degrees: Degrees) -> None:
    """Raise `PlanError` for what cannot be combined in `plan`, whose mesh is `degrees`."""
    if degrees.shard > 1 and degrees.data > 1 and plan.zero in (1, 2):
        raise PlanError(
            f"plan: zero = {plan.zero} with data = {degrees.data} and shard = {degrees.shard}: at stages 1 and 2 "
            "all data-parallel ranks share the shards",
            remedy=f"set shard = {degrees.data * degrees.shard} and data = 1, or zero = 3",
        )
    if degrees.is_data_alone:
        return
    if plan.weight_versions > 1:
        _refuse_with_versions(plan, degrees)
    for name, value, instead in (
        ("shard_within", "host", "shard = K, the number of ranks that share shards"),
        ("bf16_parameters", True, 'precision = "bf16"'),
        ("offload", "disk", 'offload = "none"'),
    ):
        if getattr(plan, name) == value:
            raise PlanError(f"plan: {name} = {value!r} with {degrees} is not there yet", remedy=f"use {instead}")
    for degree, name, values, instead in NOT_TOGETHER:
        size, value = getattr(degrees, degree), getattr(plan, name)
        if size > 1 and value in values:
            raise PlanError(
                f"plan: {name} = {value!r} with {degree} = {size} is not there yet", remedy=f"use {instead}"
            )
    if degrees.pipeline > 1 and plan.train_schedule:
        raise PlanError(
            f"plan: train_schedule with pipeline = {degrees.pipeline} is not there yet",
            remedy="leave train_schedule out",
        )
    if degrees.pipeline > 1 and plan.zero == MOST_ZERO and plan.schedule.startswith("zb"):
        raise PlanError(
            f"plan: schedule = {plan.schedule!r} with zero = {MOST_ZERO} is not there yet: it computes gradients "
            "of inputs and weights apart, and parameters are gathered for both at once",
            remedy='use schedule = "1f1b" or "interleaved"',
        )


def _refuse_with_versions(plan: Plan, degrees: Degrees) -> None:
    """Refuse what is not shown to be right where a batch begins before the last one has ended."""
    for name in ("shard", "expert", "context", "tensor"):
        if getattr(degrees, name) > 1:
            raise PlanError(
                f"plan: weight_versions = {plan.weight_versions} with {name} = {getattr(degrees, name)} is not "
                "there yet",
                remedy="use pipeline and data alone, or weight_versions = 1",
            )
    for name, value in (("zero", 0), ("sync_batch_norm", False), ("nonfinite", "propagate")):
        if getattr(plan, name) != value:
            raise PlanError(
                f"plan: weight_versions = {plan.weight_versions} with {name} = {getattr(plan, name)!r} is not "
                "there yet",
                remedy=f"leave {name} or weight_versions out",
            )
    if CodecSpec.parse(plan.codec).name == AUTO:
        raise PlanError(
            f"plan: weight_versions = {plan.weight_versions} with codec = {plan.codec!r}, which chooses by steps "
            "whose backward pass ends in them",
            remedy="name a codec, or none",
        )


def refuse_codecs_of_rows(plan: Plan) -> None:
    """Raise `PlanError` for codecs that ZeRO stages 1 and 2 cannot use: each element goes to one rank."""
    if plan.zero not in (1, 2):
        return
    for key, value in [("codec", plan.codec), *((f"codec_for.{p}", c) for p, c in plan.codec_for.items())]:
        spec = CodecSpec.parse(value)
        if not spec.is_exact and not spec.is_quantized:
            raise PlanError(
                f"plan: zero = {plan.zero} sends every element to one rank, but {key} = {value!r} does not",
                remedy="use a quantised codec (bf16, fp16, int8, fp8, int4), or set zero = 0",
            )
