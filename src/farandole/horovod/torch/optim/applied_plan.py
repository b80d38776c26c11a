"""The plan of the job and the arguments of one `DistributedOptimizer`, made one.

[Note: two voices] A script for Horovod says some of what a plan says: ``compression=`` is the codec,
``backward_passes_per_step=`` is `accumulate`. Where one of both leaves it as by default, the other counts; where
both say something, and not the same, it is an error naming both. What a plan says of gradients holds for
optimizers alone: ``hvd.allreduce`` and its like travel as their own arguments say.

[Note: named operations] On the tensor path gradients are named operations, which know no routes and no tuning. A
plan that asks for those is refused there, because it would silently have no effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ....comm.codecs.eligibility import can_have
from ....comm.world.world import World
from ....core.environ.job_plan import JobPlan
from ....core.vocabulary.codec_spec import AUTO, CodecSpec
from ....core.vocabulary.errors import ConfigError, PlanError
from ....core.vocabulary.spec import Plan
from ...common.basics import basics
from ..compression import codec_of, name_of

_HONOURED = ("version", "bucket_bytes", "accumulate", "clip_norm", "buffers", "lossy", "timeout_seconds")
"""Keys that mean something on the tensor path, whatever their value."""
_FLAT = ("auto", "flat")


def apply_plan(job: JobPlan, compression: Any, passes: int) -> Plan:
    """Return the plan of one optimizer. See [Note: two voices].

    Raises `ConfigError` where the script and the plan differ, `PlanError` for keys that need the model.
    """
    plan = job.plan
    if plan.sync_batch_norm:
        raise PlanError(
            f"{job.describe('sync_batch_norm')}, but hvd.DistributedOptimizer is given no model",
            remedy="in the script: model = hvd.SyncBatchNorm.convert_sync_batchnorm(model)",
        )
    codec = codec_of(compression)
    if codec is None and (plan.codec != "none" or plan.codec_for):
        raise _differ(job, "codec" if plan.codec != "none" else "codec_for", f"compression={name_of(compression)}")
    if codec not in (None, "none"):
        if plan.codec != "none" and CodecSpec.parse(plan.codec) != CodecSpec.parse(str(codec)):
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


def plan_for_reducer(plan: Plan, compression: Any, parameters: Iterable[torch.Tensor], here: World) -> Plan:
    """Return what the engine of one optimizer applies."""
    spec = CodecSpec.parse(plan.codec)
    by_script = codec_of(compression) not in (None, "none")
    if by_script and spec.name not in ("none", AUTO) and not any(can_have(each, spec) for each in parameters):
        plan = replace(plan, codec="none")  # a small model has nothing to compress: no mistake in the script
    # A threshold of 0 joins nothing, in the first bucket neither.
    plan = replace(plan, first_bucket_bytes=min(plan.first_bucket_bytes, plan.bucket_bytes))
    if plan.timeout_seconds == Plan().timeout_seconds:
        plan = replace(plan, timeout_seconds=here.timeout_seconds)
    if plan.route == "hierarchical" and basics.running.settings.asks_for_hierarchy and not _has_hierarchy(here):
        plan = replace(plan, route="auto")  # Horovod's flag means: inside a host first, where there are several
    return plan


def _has_hierarchy(here: World) -> bool:
    return here.node_count > 1 and here.local_size > 1


def refuse_for_named(job: JobPlan, plan: Plan, why: str) -> None:
    """Raise `PlanError` for keys without a meaning on the tensor path. See [Note: named operations].

    `why`: what made them so.
    """
    for key in job.changed():
        is_codec = key in ("codec", "codec_for") and plan.codec != AUTO
        if key not in _HONOURED and not is_codec and not (key == "route" and plan.route in _FLAT):
            raise _meaningless(job, key, f"its gradients are named operations, because {why}")


def refuse_for_adasum(job: JobPlan) -> None:
    """Raise `PlanError` for keys that mean nothing if updates are exchanged instead of gradients."""
    for key in job.changed():
        if key in ("codec", "codec_for", "clip_norm") or (key not in _HONOURED and key != "route"):
            raise _meaningless(job, key, "with op=Adasum no gradients travel")
    if job.plan.route not in _FLAT:
        raise _meaningless(job, "route", "with op=Adasum no gradients travel")


def _meaningless(job: JobPlan, key: str, why: str) -> PlanError:
    return PlanError(
        f"{job.describe(key)} has no meaning for this hvd.DistributedOptimizer: {why}",
        remedy=f"drop {key} from the plan, or the argument from the script",
    )


@torch.no_grad()
def clip_gradients(plan: Plan, parameters: Sequence[torch.Tensor]) -> None:
    """Clip the mean gradients to the plan's norm, if it has one."""
    if plan.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(parameters, plan.clip_norm)
