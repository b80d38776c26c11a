"""Where each split layer stands: which of them begin and end a region, and whose tokens are divided."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ...core.vocabulary.errors import PlanError
from ..blocks import repeated_blocks
from ..changed_class import features_of
from .cut import LayerPlace
from .layers.region_seed import RegionSeed, has_dropout
from .recipe.recipe import TensorRecipe, parents
from .recipe.units import Units


@dataclass
class Places:
    """The places of all layers of a recipe."""

    of: dict[str, LayerPlace] = field(default_factory=dict)
    blocks: list[str] = field(default_factory=list)
    """Blocks whose tokens are divided: see [Note: tokens of a block]."""
    entries: list[str] = field(default_factory=list)
    """Modules before which tokens are gathered."""


def find_places(
    model: nn.Module, recipe: TensorRecipe, units: Units, seed: RegionSeed, *, by_tokens: bool
) -> Places:
    """Return the place of each split layer of `recipe`; `by_tokens`: the plan key `sequence_parallel`.

    Raises `PlanError` if tokens are to be divided, and no repeated block has a split layer.
    """
    places = Places()
    for unit, layers in units.layers.items():
        own = seed if has_dropout(model.get_submodule(unit)) else None
        for name in layers:
            places.of[name] = LayerPlace(
                gathers=name in units.gathers, seed=None if name in units.gathers else own
            )
    if not by_tokens:
        return places
    for block, _ in repeated_blocks(model):
        inside = {unit: layers for unit, layers in units.layers.items() if f"{unit}.".startswith(f"{block}.")}
        if inside:
            _refuse_statistics(model, block)
            places.blocks.append(block)
        for layers in inside.values():
            _divide_tokens(places, recipe, model, block, layers)
    if not places.blocks:
        raise PlanError(
            "plan: sequence_parallel = true, but no repeated block of this model has a split layer",
            remedy="leave sequence_parallel out, or name layers of its blocks by tensor_recipe",
        )
    return places


def _refuse_statistics(model: nn.Module, block: str) -> None:
    """Raise `PlanError` for statistics over tokens, of which a rank has some: a proof in evaluation sees none."""
    for name, module in model.get_submodule(block).named_modules():
        if isinstance(module, _NormBase) and module.track_running_stats:
            raise PlanError(
                f"plan: sequence_parallel = true, but {block}.{name} takes statistics over all tokens, of which a "
                "rank has some",
                remedy="leave sequence_parallel out",
            )


def _divide_tokens(places: Places, recipe: TensorRecipe, model: nn.Module, block: str, layers: list[str]) -> None:
    columns, rows = ([name for name in layers if recipe.parts[name].kind == kind] for kind in ("columns", "rows"))
    entry = _common(columns, block)
    if len(columns) == 1:
        # Queries, keys and values in one layer, whose module in transformers reads the shape of its input.
        given = features_of(model.get_submodule(columns[0]))[1] if rows else 0
        is_fused = rows and given > features_of(model.get_submodule(rows[0]))[0]
        entry = entry if is_fused and recipe.parts[columns[0]].source == "transformers" else None
    if entry:
        places.entries.append(entry)
    for name in layers:
        # The whole block is one region of seeds, because its norms and dropout have this rank's tokens.
        begins = "before" if entry and name in columns else "tokens"
        places.of[name] = LayerPlace(gathers=places.of[name].gathers, begins=begins, by_tokens=True)  # type: ignore[arg-type]


def _common(names: list[str], block: str) -> str | None:
    """Return the innermost module around all of `names`, inside of `block`; None if that is the block."""
    for parent in parents(names[0]) if names else ():
        if parent == block:
            return None
        if all(name.startswith(f"{parent}.") for name in names):
            return parent
    return None
