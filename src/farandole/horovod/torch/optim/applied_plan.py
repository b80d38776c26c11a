"""The plan of the job as the reducer of one `DistributedOptimizer` applies it: see `common.applied_plan`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ....comm.codecs.registry import can_have
from ....comm.world.world import World
from ....core.environ.job_plan import JobPlan
from ....core.vocabulary.codec_spec import NONE, CodecSpec
from ....core.vocabulary.spec import Plan
from ...common.applied_plan import FLAT, HONOURED, meaningless
from ...common.basics import basics
from ...common.compression import codec_of


def plan_for_reducer(plan: Plan, compression: Any, parameters: Iterable[torch.Tensor], here: World) -> Plan:
    """Return what the engine of one optimizer applies."""
    spec = CodecSpec.parse(plan.codec)
    by_script = codec_of(compression) not in (None, NONE)
    if by_script and spec.is_applied and not any(can_have(each, spec) for each in parameters):
        plan = replace(plan, codec=NONE)  # a small model has nothing to compress: no mistake in the script
    # A threshold of 0 joins nothing, in the first bucket neither.
    if plan.bucket_bytes:
        plan = replace(plan, first_bucket_bytes=min(plan.first_bucket_bytes, plan.bucket_bytes))
    if plan.timeout_seconds == Plan().timeout_seconds:
        plan = replace(plan, timeout_seconds=here.timeout_seconds)
    if plan.route == "hierarchical" and basics.running.settings.asks_for_hierarchy and not _has_hierarchy(here):
        plan = replace(plan, route="auto")  # Horovod's flag means: inside a host first, where there are several
    return plan


def _has_hierarchy(here: World) -> bool:
    return here.node_count > 1 and here.local_size > 1


def refuse_for_adasum(job: JobPlan) -> None:
    """Raise `PlanError` for keys that mean nothing if updates are exchanged instead of gradients."""
    for key in job.changed():
        if key in ("codec", "codec_for", "clip_norm") or (key not in HONOURED and key != "route"):
            raise meaningless(job, key, "with op=Adasum no gradients travel")
    if job.plan.route not in FLAT:
        raise meaningless(job, "route", "with op=Adasum no gradients travel")


@torch.no_grad()
def clip_gradients(plan: Plan, parameters: Sequence[torch.Tensor]) -> None:
    """Clip the mean gradients to the plan's norm, if it has one."""
    if plan.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(parameters, plan.clip_norm)
