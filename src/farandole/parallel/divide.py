"""Dividing a model over ranks that do not hold all of it, in the order in which divisions can follow each other.

Each rank has the whole model of rank 0 before. Layers are divided first (tensor), then experts, then attention
over sequences (context); a pipeline is cut last, at its first step, when the layers of each rank are as they
will be.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from ..comm.gradients.parameters import ParameterTable
from ..comm.world.store_sync import require_same
from ..core.vocabulary.rules import MOST_ZERO
from ..core.vocabulary.spec import Plan
from .context.apply import apply_context, refuse_sequences
from .expert.apply_expert import apply_expert, has_experts, refuse_divided_tokens, refuse_experts
from .global_norm import watch_norms
from .mesh import Mesh
from .model import DistributedModel
from .refuse_optimizers import refuse_indivisible
from .seeds import seed_passes
from .tensor.apply_tensor import apply_tensor, plan_tensor
from .zero.fsdp.shard import check_shardable


def check_division(mesh: Mesh, model: nn.Module, optimizers: Sequence[Optimizer], plan: Plan) -> None:
    """Raise what stands against sharding or dividing `model` by `plan`; to be called by all ranks.

    Nothing is sent or changed.

    Raises:
        Mismatch: the ranks' models differ.
        PlanError: the model cannot be divided so.
        ConfigError: a layer or an optimizer that cannot be, by name.
    """
    facts = ParameterTable(list(model.named_parameters())).describe()
    require_same(mesh.here, "comparing parameters", facts)
    if plan.zero == MOST_ZERO:
        check_shardable(mesh.replicas, model, optimizers, plan, mesh.copies)
    refuse_indivisible(optimizers, mesh.degrees)
    if mesh.size("tensor") > 1:
        refuse_divided_tokens(model, plan_tensor(model, plan, mesh).places.blocks)
    if mesh.size("expert") > 1:
        refuse_experts(model, optimizers, mesh.size("expert"))
    if mesh.size("context") > 1:
        refuse_sequences(model, plan)


def divide_model(distributed: DistributedModel, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Leave of `model` what is this rank's by the degrees of its plan; to be called by all ranks.

    After `check_division`.
    """
    plan, mesh = distributed.plan_and_mesh
    tokens = None
    if mesh.size("tensor") > 1:
        tokens = apply_tensor(distributed, model, optimizers)
    if mesh.size("expert") > 1 or has_experts(model):
        apply_expert(model, optimizers, plan, mesh, tokens)
    if mesh.size("context") > 1:
        apply_context(model, plan, mesh)
    if mesh.size("tensor", "pipeline", "expert") > 1:
        watch_norms()
    if mesh.size("tensor", "context") > 1:
        distributed.seeds = seed_passes(model, mesh)
