"""What cannot be split: refused by name, before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ....core.vocabulary.errors import ConfigError, PlanError
from ...changed_class import require_changeable
from ...frozen.adapters import DOWN
from ...frozen.frozen_weight import FrozenWeight
from ...zero.elementwise import why_not_elementwise
from ..layers.split_layers import is_linear
from .recipe import TensorRecipe


def refuse_layers(model: nn.Module, recipe: TensorRecipe) -> None:
    """Raise `PlanError` for layers whose weights are not plain parameters of the layer alone."""
    for name, part in recipe.parts.items():
        if part.kind == "whole":
            continue
        layer: Any = model.get_submodule(name)
        require_changeable(layer, f"plan: tensor, layer {name!r}")
        why = _why_not(layer)
        if part.kind == "vocabulary" and not (is_linear(layer) or isinstance(layer, nn.Embedding)):
            why = f'a {type(layer).__name__} has no "vocabulary"'
        if why:
            raise PlanError(
                f"plan: tensor: {name!r} cannot be split: {why}",
                remedy=f'leave it whole: tensor_recipe = {{ "{name}" = "whole" }}',
            )


def _why_not(layer: nn.Module) -> str:
    if torch.nn.utils.parametrize.is_parametrized(layer):
        return "its weight is a parametrization, made anew in each forward pass"
    if hasattr(layer, "weight_g") or hasattr(layer, "weight_orig") or hasattr(layer, "weight_v"):
        return "its weight is made of others by a hook (weight norm, spectral norm or pruning)"
    if hasattr(layer, DOWN) or hasattr(layer, "lora_A"):
        return "it has low-rank adapters, which are not split with it"
    if any(isinstance(each, FrozenWeight) for each in layer.parameters()):
        return "its frozen weight is stored in few bits (frozen_codec)"
    if any(
        not isinstance(each, nn.Parameter) or type(each.data) is not torch.Tensor for each in layer.parameters()
    ):
        return "its weight is a tensor of another class"
    if isinstance(layer, nn.Embedding) and layer.max_norm is not None:
        return "max_norm looks at whole rows of the embedding"
    if isinstance(layer, nn.Embedding) and (layer.sparse or layer.scale_grad_by_freq):
        return "its gradients are sparse, or scaled by how often a word occurs"
    return ""


def refuse_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Raise `ConfigError` for optimizers whose update of an element depends on others of the same parameter."""
    for optimizer in optimizers:
        why = why_not_elementwise(optimizer)
        if why:
            raise ConfigError(
                f"plan: tensor: {type(optimizer).__name__} cannot update parts of parameters: {why}",
                remedy="use an optimizer that works element by element, such as torch.optim.AdamW",
            )
