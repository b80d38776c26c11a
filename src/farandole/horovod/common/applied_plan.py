"""The plan of the job and the arguments of one `DistributedOptimizer`, made one.

[Note: two voices] A script for Horovod says some of what a plan says: ``compression=`` is the codec,
``backward_passes_per_step=`` is `accumulate`. Where one of both leaves it as by default, the other counts; where
both say something, and not the same, it is an error naming both. What a plan says of gradients holds for
optimizers alone: ``hvd.allreduce`` and its like travel as their own arguments say.

[Note: named operations] On the tensor path gradients are named operations, which know no tuning of connections,
and of the routes ``flat`` and ``hierarchical``; ``auto`` chooses between these. A plan that asks for more is
refused there, because it would silently have no effect. Codecs are chosen by the engine: see
`horovod.named_ops.auto_codecs`.

[Note: auto is no codec] With codec ``auto`` the plan leaves the codec open: ``compression=`` counts instead.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...comm.codecs.registry import can_have, choose_codec, pattern_for
from ...core.job_plan import JobPlan
from ...core.vocabulary.codec_spec import AUTO, NONE, CodecSpec
from ...core.vocabulary.errors import ConfigError, PlanError
from ...core.vocabulary.rules import check
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.text import write_notice
from .basics import basics
from .compression import codec_of, name_of
from .reductions import Adasum

HONOURED = (
    "version", "bucket_bytes", "accumulate", "clip_norm", "buffers", "lossy", "timeout_seconds", "predicted",
)  # fmt: skip
"""Keys that mean something on the tensor path, whatever their value; what is predicted is for the reader."""
FLAT = ("auto", "flat")
"""Routes that named operations can take everywhere."""
_SMALLEST = CodecSpec.parse("int8")
"""What may have it, may have each codec that is chosen from."""


def apply_plan(job: JobPlan, compression: Any, passes: int) -> Plan:
    """Return the plan of one optimizer. See [Note: two voices].

    Raises `ConfigError` where the script and the plan differ, `PlanError` for keys that need the model.
    """
    plan = job.plan
    check({**vars(plan), "horovod": True})
    codec = codec_of(compression)
    if plan.codec == AUTO and codec != NONE:  # see [Note: auto is no codec]
        plan = replace(plan, codec=NONE)
    if codec is None and (plan.codec != NONE or plan.codec_for):
        raise _differ(job, "codec" if plan.codec != NONE else "codec_for", f"compression={name_of(compression)}")
    if codec not in (None, NONE):
        if plan.codec != NONE and CodecSpec.parse(plan.codec) != CodecSpec.parse(str(codec)):
            raise _differ(job, "codec", f"compression={codec}")
        plan = replace(plan, codec=str(codec), lossy=True)
    return replace(plan, accumulate=agree_on_passes(job, passes), buffers="local")


def agree_on_passes(job: JobPlan, passes: int) -> int:
    """Return how many passes are added up before an exchange. See [Note: two voices]."""
    theirs = job.plan.accumulate
    if theirs != 1 and passes not in (1, theirs):
        raise _differ(job, "accumulate", f"backward_passes_per_step={passes}")
    return max(theirs, passes)


def _differ(job: JobPlan, key: str, argument: str) -> ConfigError:
    return ConfigError(
        f"the plan of the job says {job.describe(key)}, and hvd.DistributedOptimizer is given {argument}",
        remedy=f"drop one of them: {key} from the plan, or the argument from the script",
    )


def plan_for_named(job: JobPlan, plan: Plan, op: int, why: str) -> Plan:
    """Return the plan of an optimizer whose gradients are named operations. See [Note: named operations].

    Args:
        job: the plan of the job.
        plan: that of the optimizer, by `apply_plan`.
        op: how gradients are reduced.
        why: what made them named operations.

    Raises:
        PlanError: a key has no meaning on the tensor path.
    """
    for key in job.changed():
        is_route = key == "route" and (plan.route in FLAT or _is_by_host(plan.route))
        if key not in (*HONOURED, "codec", "codec_for") and not is_route:
            raise meaningless(job, key, f"its gradients are named operations, because {why}")
    if plan.codec != AUTO:
        return plan
    if op == Adasum:
        raise meaningless(job, "codec", "op=Adasum needs exact gradients")
    if plan.lossy:
        return plan
    running = basics.running
    if not running.said_auto_is_exact and running.world.rank == 0:
        write_notice(f"codec {AUTO}: {NONE} (lossy codecs need the plan key lossy)")
    running.said_auto_is_exact = True
    return replace(plan, codec=NONE)


def codec_of_gradient(name: str, gradient: Any, plan: Plan) -> str:
    """Return how a gradient travels as a named operation, in the spelling of a plan.

    `gradient`: a tensor of torch of its shape and dtype. Raises `PlanError` as `choose_codec` does.
    """
    if plan.codec == AUTO and pattern_for(name, plan) is None:
        return AUTO if plan.lossy and can_have(gradient, _SMALLEST) else NONE
    return choose_codec(name, gradient, plan).to_text()


def _is_by_host(route: str) -> bool:
    """Return whether it is a route that large named operations take here, or that Horovod's flag asks for."""
    running = basics.running
    return route == "hierarchical" and (running.engine.by_host or running.settings.asks_for_hierarchy)


def refuse_other_passes(job: JobPlan, plan: Plan, passes: int) -> None:
    """Raise `PlanError` where the plan's number of passes is not the script's, which alone counts them."""
    if plan.accumulate != passes:
        raise meaningless(job, "accumulate", f"passes are counted by backward_passes_per_step={passes}")


def meaningless(job: JobPlan, key: str, why: str) -> PlanError:
    """Return the error for a key of the plan that would silently have no effect."""
    return PlanError(
        f"{job.describe(key)} has no meaning for this hvd.DistributedOptimizer: {why}",
        remedy=f"drop {key} from the plan, or the argument from the script",
    )
