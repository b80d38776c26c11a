"""What becomes of each layer: the recipe, as data, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import nn

from ....core.vocabulary.errors import PlanError
from ....core.vocabulary.spec import Plan
from ...blocks import repeated_blocks
from ...changed_class import features_of, require_changeable
from ...frozen.adapters import DOWN
from ...frozen.encode_model import frozen_weights
from ...frozen.frozen_weight import FORMS, FrozenWeight
from ..layers.split_layers import is_linear

# Units: the modules around a split region, from its beginning to its end, whose output every rank has whole.


@dataclass
class Units:
    """The units of a recipe."""

    layers: dict[str, list[str]] = field(default_factory=dict)
    """The split layers of each unit, by the names of both."""
    gathers: set[str] = field(default_factory=set)
    """Layers by columns that no layer by rows follows: their output is gathered."""


def find_units(model: nn.Module, recipe: TensorRecipe) -> Units:
    """Return the units of `recipe`.

    The unit of a layer by columns is the innermost module that also has a layer by rows after it, up to the
    repeated block that it is in. Without one the layer is a unit of its own, and so are layers of other kinds.
    """
    units = Units()
    blocks = {name for name, _ in repeated_blocks(model)}
    order = recipe.of_kind("columns", "rows")
    order = [name for name in order if not isinstance(model.get_submodule(name), nn.Embedding)]
    closed: set[str] = set()
    for at, name in enumerate(order):
        if recipe.parts[name].kind != "columns":
            continue
        found = _around(name, [each for each in order[at:] if recipe.parts[each].kind == "rows"], blocks)
        if found is None:
            units.gathers.add(name)
            units.layers.setdefault(name, []).append(name)
        else:
            units.layers.setdefault(found, []).append(name)
            closed.add(found)
    for name in order:
        if recipe.parts[name].kind == "rows":
            unit = next((each for each in parents(name) if each in closed), name)
            units.layers.setdefault(unit, []).append(name)
    for name in recipe.parts:
        if name not in order and recipe.parts[name].kind != "whole":
            units.layers.setdefault(name, []).append(name)
    return units


def _around(name: str, rows: list[str], blocks: set[str]) -> str | None:
    for parent in parents(name):
        prefix = f"{parent}." if parent else ""
        if any(each.startswith(prefix) for each in rows):
            return parent
        if parent in blocks:
            return None
    return None


Kind = Literal["columns", "rows", "vocabulary", "attention", "whole"]
"""Split by output features; by input features; by words; torch's own attention, by heads; or not at all."""
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class LayerPart:
    """What becomes of one layer."""

    kind: Kind
    source: str
    """Who says so, for notices."""
    packed: int = 1
    """Equal matrices that the weight of a layer by columns consists of, such as those of query, key and value."""


@dataclass
class TensorRecipe:
    """What becomes of each layer of a model, by its name, in the order of `named_modules`."""

    parts: dict[str, LayerPart] = field(default_factory=dict)
    attributes: dict[str, dict[str, int]] = field(default_factory=dict)
    """Whole numbers of modules, by the modules' names, that are divided: counts of heads, widths of heads."""
    by_user: set[str] = field(default_factory=set)
    """Names that the plan's patterns match."""

    def add(self, found: Mapping[str, LayerPart]) -> None:
        """Add parts that belong together, unless the user has said something of one of them."""
        if not self.by_user.intersection(found):
            for name, part in found.items():
                self.parts.setdefault(name, part)

    def of_kind(self, *kinds: Kind) -> list[str]:
        """Return the names of the layers of `kinds`."""
        return [name for name, part in self.parts.items() if part.kind in kinds]

    def order_by(self, model: nn.Module) -> None:
        """Bring the parts into the order of `model`."""
        self.parts = {name: self.parts[name] for name, _ in model.named_modules() if name in self.parts}


def parents(name: str) -> Iterator[str]:
    """Yield the names of the modules around `name`, from the inside; the model itself is the empty name."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def even(count: int, size: int, what: str) -> int:
    """Return `count` / `size`; raise `PlanError` if that is no whole number."""
    if count % size:
        fitting = [str(each) for each in range(2, count + 1) if count % each == 0][:4]
        raise PlanError(
            f"plan: tensor = {size} does not divide {what} = {count}",
            remedy=f"set tensor to {' or '.join(fitting)}"
            if fitting
            else "leave this layer whole by tensor_recipe",
        )
    return count // size


def spread(count: int, size: int) -> tuple[int, ...]:
    """Return how many of `count` each of `size` ranks has, as equal as can be."""
    return tuple(count // size + (rank < count % size) for rank in range(size))


# Counts of heads: whole numbers of attention modules, which are this rank's once their layers are split.

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


# What cannot be split: refused by name, before anything is changed.


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
