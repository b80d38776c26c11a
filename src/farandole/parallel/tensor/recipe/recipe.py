"""What becomes of each layer: the recipe, as data, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from torch import nn

from ....core.vocabulary.errors import PlanError

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
