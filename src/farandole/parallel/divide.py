"""Dividing a model over ranks that do not hold all of it, in the order in which divisions can follow each other.

Each rank has the whole model of rank 0 before. Layers are divided first (tensor), then experts, then attention
over sequences (context); a pipeline is cut last, at its first step, when the layers of each rank are as they
will be.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from ..core.vocabulary.spec import Plan
from .context.apply import apply_context
from .expert.apply_expert import apply_expert, has_experts
from .global_norm import watch_norms
from .mesh import Mesh
from .seeds import seed_passes
from .tensor.apply_tensor import apply_tensor


def divide_model(mesh: Mesh, model: nn.Module, optimizers: Sequence[Optimizer], plan: Plan) -> None:
    """Leave of `model` what is this rank's by the degrees of `plan`; to be called by all ranks.

    Raises:
        PlanError: the model cannot be divided so.
    """
    if mesh.size("tensor") > 1:
        apply_tensor(model, optimizers, plan, mesh)
    if mesh.size("expert") > 1 or has_experts(model):
        apply_expert(model, optimizers, plan, mesh)
    if mesh.size("context") > 1:
        apply_context(model, plan, mesh)
    if mesh.size("tensor", "pipeline", "expert") > 1:
        watch_norms(model, mesh)
    if mesh.size("tensor", "context") > 1:
        seed_passes(model, mesh)
