"""The weights that autocast casts and that nothing else uses: those of matrix products, by their layers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils.weak import WeakIdKeyDictionary

from ..changed_class import is_transposed, plain_class_of

OF_ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
"""Weights of `nn.MultiheadAttention` itself; it reads that of its last layer, too, and does not call that."""
_PRODUCTS = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip

Users = Mapping[nn.Parameter, list[tuple[nn.Module, str]]]


def product_weights(model: nn.Module) -> Users:
    """Return the float32 weights of linear layers and convolutions, each with its layers and its name there.

    What counts is the class, torch's own or transformers' Conv1D: of any other it is not known what it does. A
    weight that another module has too is left out.
    """
    attention = [each for each in model.modules() if plain_class_of(each) is nn.MultiheadAttention]
    last = {id(each.out_proj) for each in attention}
    users: WeakIdKeyDictionary = WeakIdKeyDictionary()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                users.setdefault(parameter, []).append((module, name))
    return {
        each: known
        for each, known in users.items()
        if each.dtype == torch.float32 and all(_is_product(module, name, last) for module, name in known)
    }


def _is_product(module: nn.Module, name: str, last_of_attention: set[int]) -> bool:
    kind = plain_class_of(module)
    if "forward" in vars(module) or isinstance(module, torch.jit.ScriptModule):
        return False
    if kind is nn.MultiheadAttention:
        return name in OF_ATTENTION
    is_last = kind is NonDynamicallyQuantizableLinear and id(module) in last_of_attention
    return name == "weight" and (kind in _PRODUCTS or is_transposed(module) or is_last)
