"""Dividing the sequences of a model over the context ranks of a mesh."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from ...core.vocabulary.errors import ConfigError, PlanError
from ...core.vocabulary.spec import Plan
from ..changed_class import change_class, make_kin
from ..mesh import Mesh
from ..outer_pass import set_outer_pass
from .attention import DividedAttention
from .catch import AttentionCatcher
from .context import Context
from .group import ContextGroup
from .model_pass import DividedSequences, ModelPass
from .transformers_models import require_right_kind


def apply_context(model: nn.Module, plan: Plan, mesh: Mesh) -> None:
    """Let attention in `model` see the tokens of all context ranks; to be called by all ranks.

    Parameters and the loop's objects stay as they are.

    Raises:
        PlanError: another model of this world has other context ranks.
    """
    here = mesh.here
    context = here.session.kept(Context)
    if context is None:
        group = mesh.group("context")
        assert group is not None, "a degree above 1 has a group"
        ranks = ContextGroup(here, group, mesh.rank("context"), mesh.size("context"), mesh.ranks("context"))
        plain = functional.scaled_dot_product_attention
        context = Context(DividedAttention(ranks, plan.context_kind, plain))
        here.session.keep(Context, lambda: context)
    if tuple(context.group.ranks) != mesh.ranks("context"):
        raise PlanError(
            f"context: another model of this world divides sequences over ranks {list(context.group.ranks)}, and "
            f"this one would over {list(mesh.ranks('context'))}",
            remedy="give all models one plan",
        )
    known = context
    catcher = here.session.keep(AttentionCatcher, lambda: AttentionCatcher(known))
    catcher.install(model)
    here.session.call_on_close(catcher.remove)
    here.session.call_in_forked_child(catcher.remove)
    for entry in _entries(model):
        passes = vars(entry)["_farandole_context"] = ModelPass(context)
        set_outer_pass(entry, passes)
        kind: Any = type(entry)
        change_class(entry, make_kin(DividedSequences, kind), "plan: context")


def _entries(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are called: the model, or the modules of a list or dict of them."""
    if isinstance(model, (nn.ModuleList, nn.ModuleDict)):
        return [entry for child in model.children() for entry in _entries(child)]
    return [model]


def refuse_sequences(model: nn.Module, plan: Plan) -> None:
    """Raise `ConfigError` for layers that cannot be divided along the sequence."""
    require_right_kind(model)
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and not plan.sync_batch_norm:
            raise ConfigError(
                f"context: {name!r} is a {type(module).__name__}, whose statistics would be of one rank's tokens",
                remedy="set sync_batch_norm = true",
            )
        if isinstance(module, nn.RNNBase):
            raise ConfigError(
                f"context: {name!r} is a {type(module).__name__}, which goes through a sequence token by token",
                remedy="set context = 1 for this model",
            )
