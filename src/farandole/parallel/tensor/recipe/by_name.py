"""The user's recipe: the plan key `tensor_recipe`, by patterns of names."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn

from ....core.vocabulary.errors import PlanError
from ....core.vocabulary.suggestions import nearest
from ...changed_class import plain_class_of
from ..layers.split_layers import is_linear
from .recipe import KINDS, Kind, LayerPart, TensorRecipe

DIVIDE = "divide"
_NAMES = 12
"""Names that an error lists at most."""


def add_by_name(recipe: TensorRecipe, model: nn.Module, wanted: Mapping[str, str]) -> None:
    """Add what `wanted` says of layers and of whole numbers of modules; the last pattern that matches counts.

    Raises `PlanError` for patterns that match nothing, or modules of other kinds.
    """
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    numbers = {
        f"{name}.{key}" if name else key: (name, key, value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if type(value) is int and not key.startswith("_")
    }
    for pattern, word in wanted.items():
        if word == DIVIDE:
            _add_numbers(recipe, pattern, numbers)
            continue
        kind = next(each for each in KINDS if each == word)
        matching = {name: module for name, module in modules.items() if fnmatchcase(name, pattern)}
        layers = {name: module for name, module in matching.items() if _takes(module, kind)}
        if not layers:
            raise _no_match(pattern, kind, matching, modules)
        for name in layers:
            recipe.parts[name] = LayerPart(kind, f"tensor_recipe {pattern!r}")
            recipe.by_user.add(name)


def _add_numbers(recipe: TensorRecipe, pattern: str, numbers: Mapping[str, tuple[str, str, int]]) -> None:
    found = [each for name, each in numbers.items() if fnmatchcase(name, pattern)]
    if not found:
        raise PlanError(
            f"plan: tensor_recipe: the pattern {pattern!r} matches no whole number of a module",
            remedy=_nearest(pattern, list(numbers)),
        )
    for name, key, value in found:
        recipe.attributes.setdefault(name, {})[key] = value


def _takes(module: nn.Module, kind: Kind) -> bool:
    if kind == "whole":
        return is_linear(module) or isinstance(module, (nn.Embedding, nn.MultiheadAttention))
    if kind == "attention":
        return isinstance(module, nn.MultiheadAttention)
    return is_linear(module) or isinstance(module, nn.Embedding)


def _no_match(
    pattern: str, kind: Kind, matching: Mapping[str, nn.Module], modules: Mapping[str, nn.Module]
) -> PlanError:
    fit = [name for name, module in modules.items() if _takes(module, kind)]
    if matching:
        name, module = next(iter(matching.items()))
        return PlanError(
            f'plan: tensor_recipe: {pattern!r} = "{kind}" matches {name!r}, a {plain_class_of(module).__name__}, '
            "expected a Linear or Embedding layer",
            remedy=_nearest(pattern, fit),
        )
    return PlanError(
        f"plan: tensor_recipe: the pattern {pattern!r} matches no layer", remedy=_nearest(pattern, fit)
    )


def _nearest(pattern: str, names: list[str]) -> str:
    ends = {name.rpartition(".")[2]: None for name in names}
    begin, dot, end = pattern.rpartition(".")
    near = nearest(pattern, names)
    if near is None and "*" in begin and (tail := nearest(end, ends)) is not None:
        near = f"{begin}{dot}{tail}"
    return f"did you mean {near!r}?" if near else f"there are: {', '.join(names[:_NAMES]) or 'none'}"
