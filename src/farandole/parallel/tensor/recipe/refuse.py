"""What cannot be split: refused by name, before anything is changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ....core.vocabulary.errors import PlanError
from ....core.vocabulary.spec import Plan
from ...changed_class import require_changeable
from ...frozen.adapters import DOWN
from ...frozen.block_codes import FORMS
from ...frozen.encode_model import frozen_weights
from ...frozen.frozen_weight import FrozenWeight
from ..layers.split_layers import is_linear
from .recipe import TensorRecipe


def refuse_layers(model: nn.Module, recipe: TensorRecipe, plan: Plan) -> None:
    """Raise `PlanError` for layers whose weights are not plain parameters of the layer alone, or will not be."""
    encoded = {id(weight) for weight, _ in frozen_weights(model)} if plan.frozen_codec in FORMS else set()
    for name, part in recipe.parts.items():
        if part.kind == "whole":
            continue
        layer: Any = model.get_submodule(name)
        require_changeable(layer, f"plan: tensor, layer {name!r}")
        why = _why_not(layer)
        if any(id(each) in encoded or isinstance(each, FrozenWeight) for each in layer.parameters()):
            why = "its frozen weight is stored in few bits (frozen_codec)"
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
    if any(
        not isinstance(each, nn.Parameter) or type(each.data) is not torch.Tensor for each in layer.parameters()
    ):
        return "its weight is a tensor of another class"
    if isinstance(layer, nn.Embedding) and layer.max_norm is not None:
        return "max_norm looks at whole rows of the embedding"
    if isinstance(layer, nn.Embedding) and (layer.sparse or layer.scale_grad_by_freq):
        return "its gradients are sparse, or scaled by how often a word occurs"
    return ""
