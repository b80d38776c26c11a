"""Counts of heads: whole numbers of attention modules, which are this rank's once their layers are split."""

from __future__ import annotations

from typing import Any

from torch import nn

from ....core.vocabulary.errors import PlanError
from ...changed_class import features_of
from .recipe import TensorRecipe

_COUNTS = (
    "num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead", "nheads", "num_q_heads",
    "num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads",
)  # fmt: skip
_WIDTHS = ("split_size", "all_head_size", "inner_dim", "inner_size")
"""Features of all heads together."""
_HEAD = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim", "dim_head")
"""Features of one head, which stay."""


def add_head_counts(recipe: TensorRecipe, model: nn.Module, gathers: set[str], size: int) -> None:
    """Let the recipe divide the counts of heads of modules whose layers are split by columns.

    Raises `PlanError` naming the module if its heads do not divide.
    """
    for name in recipe.of_kind("columns"):
        layer: Any = model.get_submodule(name)
        if name in gathers or isinstance(layer, nn.Embedding):
            continue
        parent = name.rpartition(".")[0]
        module = model.get_submodule(parent)
        known = recipe.attributes.setdefault(parent, {})
        for key in (*_COUNTS, *_WIDTHS):
            value = vars(module).get(key)
            if type(value) is int and key not in known:
                if value % size:
                    raise _indivisible(parent or type(model).__name__, key, value, size)
                known[key] = value
        features = features_of(layer)[1] // recipe.parts[name].packed
        for key in _HEAD:
            width = vars(module).get(key)
            if type(width) is int and width > 0 and features % width == 0 and features % (width * size):
                raise _indivisible(name, "heads", features // width, size)
    recipe.attributes = {name: numbers for name, numbers in recipe.attributes.items() if numbers}


def _indivisible(name: str, key: str, value: int, size: int) -> PlanError:
    fitting = [str(each) for each in range(2, value + 1) if value % each == 0]
    what = f"{value} heads" if key == "heads" else f"{key} = {value}"
    return PlanError(
        f"plan: tensor = {size} does not divide the {what} of {name!r}",
        remedy=f"set tensor to {', '.join(fitting[:4])}, or leave {name!r} whole by tensor_recipe"
        if fitting
        else f'leave the layers around {name!r} whole: tensor_recipe = {{ "{name}*" = "whole" }}',
    )
