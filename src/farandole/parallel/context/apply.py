"""Dividing the sequences of a model over the context ranks of a mesh.

[Note: the function's place] The function is replaced where models look it up, as long as the world has a context:
as torch.nn.functional's, and under the names by which the modules that define the model's classes have imported
it. A call that finds the original all the same is found by the proof at the model's first pass.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import handle_torch_function, has_torch_function

from ...core.vocabulary.errors import ConfigError, PlanError
from ...core.vocabulary.spec import Plan
from ..changed_class import change_class, make_kin
from ..mesh import Mesh
from ..outer_pass import set_outer_pass
from .attention import AttentionCall, DividedAttention
from .context import Context
from .group import ContextGroup
from .model_pass import DividedSequences, ModelPass
from .transformers_models import require_right_kind

# Calls of `torch.nn.functional.scaled_dot_product_attention`, led to a world's context.
_NAME = "scaled_dot_product_attention"


class AttentionCatcher:
    """What stands in the function's place. The world's session keeps one."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._plain = context.attention.plain
        self._places: list[tuple[dict[str, Any], str]] = []
        attend: Any = torch.compiler.disable(self._attend)
        self._standing = attend

    def install(self, model: nn.Module) -> None:
        """Take the function's place where `model` looks it up."""
        defining = [sys.modules.get(type(module).__module__) for module in model.modules()]
        homes = [vars(home) for home in dict.fromkeys(defining) if home is not None]
        for home in [vars(functional), *homes]:
            for name, value in list(home.items()):
                if value is self._plain:
                    home[name] = self._standing
                    self._places.append((home, name))

    def remove(self) -> None:
        """Put torch's own function back."""
        for home, name in self._places:
            if home.get(name) is self._standing:
                home[name] = self._plain
        self._places.clear()

    def _attend(self, *arguments: Any, **named: Any) -> torch.Tensor:
        tensors = [each for each in (*arguments, *named.values()) if isinstance(each, torch.Tensor)]
        if has_torch_function(tensors):  # a function mode: what records the model's code sees one call, this
            found: torch.Tensor = handle_torch_function(self._standing, tensors, *arguments, **named)
            return found
        try:
            call = AttentionCall(*arguments, **named)
        except TypeError:
            return self._plain(*arguments, **named)  # torch's own error
        return self._context.attend(call)


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
