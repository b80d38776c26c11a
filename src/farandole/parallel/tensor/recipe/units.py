"""Units: the modules around a split region, from its beginning to its end, whose output every rank has whole."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from ...blocks import repeated_blocks
from .recipe import TensorRecipe, parents


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
