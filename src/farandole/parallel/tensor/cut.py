"""Layers become parts of themselves, by a recipe: their parameters shrink in place, and their classes change."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from ...core.vocabulary.errors import PlanError
from ..blocks import repeated_blocks
from ..changed_class import change_class, features_of, is_transposed, make_kin
from ..split import Split, split_in_place, split_of
from .recipe import LayerPart, TensorRecipe, Units, even, parents, spread
from .regions import DEGREE, RegionSeed, TensorRanks, has_dropout
from .split_layers import (
    ByColumns,
    ByRows,
    FeatureEmbedding,
    SplitAttention,
    SplitLayer,
    VocabularyEmbedding,
    VocabularyOutput,
)

# Where each split layer stands: which of them begin and end a region, and whose tokens are divided.


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


_WHY = "plan: tensor, layer {!r}"


@dataclass(frozen=True)
class LayerPlace:
    """What a layer has to do with the split region it is in."""

    gathers: bool = False
    """Whether the output of a layer by columns is gathered."""
    begins: Literal["copy", "tokens", "before"] = "copy"
    by_tokens: bool = False
    seed: RegionSeed | None = None


def _kin_of(base: Any, kind: Any) -> Any:
    return make_kin(base, kind)


def check_cuts(model: nn.Module, recipe: TensorRecipe, gathers: Collection[str], size: int) -> None:
    """Raise `PlanError` if sizes do not divide, or a tied weight is split in two ways; nothing is changed.

    `gathers`: layers by columns whose output is gathered.
    """
    _refuse_ties(model, recipe)
    for name, part in recipe.parts.items():
        module: Any = model.get_submodule(name)
        if part.kind == "attention" or isinstance(module, nn.MultiheadAttention):
            if part.kind != "whole":
                even(module.num_heads, size, f"{name}: num_heads")
        elif isinstance(module, nn.Embedding):
            if part.kind == "columns":
                even(module.embedding_dim, size, f"{name}: features")
        elif part.kind == "rows":
            even(vars(module)[_INPUT[is_transposed(module)]], size, f"{name}: input features")
        elif part.kind == "columns":
            features = vars(module)[_OUTPUT[is_transposed(module)]]
            packed = f" / {part.packed}" * (part.packed > 1)
            even(features // part.packed, size, f"{name}: output features{packed}")
            if name in gathers and part.packed > 1:
                raise PlanError(f"plan: tensor: {name!r} is packed, and no layer split by rows follows it")


def _refuse_ties(model: nn.Module, recipe: TensorRecipe) -> None:
    users: dict[int, dict[str, int | None]] = {}
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            dim = _split_dim(module, recipe.parts.get(name), key)
            users.setdefault(id(parameter), {})[f"{name}.{key}"] = dim
    for dims in users.values():
        if len(set(dims.values())) > 1:
            said = " and ".join(
                f"{name!r} {'whole' if dim is None else f'split along dimension {dim}'}"
                for name, dim in dims.items()
            )
            raise PlanError(
                f"plan: tensor: one parameter would be {said}",
                remedy='give these layers one kind by tensor_recipe, such as "vocabulary" or "whole"',
            )


class Cutter:
    """Cuts the layers of one model."""

    def __init__(self, model: nn.Module, ranks: TensorRanks, optimizers: Sequence[Optimizer]) -> None:
        self.model, self.ranks, self.optimizers = model, ranks, list(optimizers)

    def cut(self, name: str, part: LayerPart, place: LayerPlace) -> None:
        """Cut the layer `name`, which is at `place` in its unit."""
        module: Any = self.model.get_submodule(name)
        kin, whole = self._kin(name, part, module), _attributes(module)
        change_class(module, _kin_of(kin, type(module)), _WHY.format(name))
        vars(module).update(
            _farandole_ranks=self.ranks,
            _farandole_name=name,
            _farandole_begins=place.begins,
            _farandole_by_tokens=place.by_tokens,
            _farandole_seed=place.seed,
            _farandole_whole=whole,
        )
        if kin is SplitAttention:
            self._cut_attention(name, module)
        elif part.kind == "rows" and not isinstance(module, nn.Embedding):
            size = even(whole[_INPUT[is_transposed(module)]], self.ranks.size, f"{name}: input features")
            self._split(module.weight, 0 if is_transposed(module) else 1, [(self.ranks.rank * size, size)])
            vars(module)[_INPUT[is_transposed(module)]] = size
        elif kin in (VocabularyEmbedding, VocabularyOutput):
            self._cut_vocabulary(module, whole)
        elif kin is FeatureEmbedding:
            size = even(whole["embedding_dim"], self.ranks.size, f"{name}: features")
            self._split(module.weight, 1, [(self.ranks.rank * size, size)])
            vars(module)["_farandole_lengths"] = (size,) * self.ranks.size
        else:
            self._cut_columns(name, part, module, gathers=place.gathers)

    def _kin(self, name: str, part: LayerPart, module: nn.Module) -> type[SplitLayer]:
        if isinstance(module, nn.MultiheadAttention):
            return SplitAttention
        if isinstance(module, nn.Embedding):
            return FeatureEmbedding if part.kind == "columns" else VocabularyEmbedding
        kinds = {"columns": ByColumns, "rows": ByRows, "vocabulary": VocabularyOutput}
        assert part.kind in kinds, f"{name} is {part.kind}"
        return kinds[part.kind]

    def _cut_columns(self, name: str, part: LayerPart, module: Any, *, gathers: bool) -> None:
        key = _OUTPUT[is_transposed(module)]
        whole, size, rank = vars(module)[key], self.ranks.size, self.ranks.rank
        one = whole // part.packed
        length = even(one, size, f"{name}: output features")
        pieces = [(at * one + rank * length, length) for at in range(part.packed)]
        self._split(module.weight, 1 if is_transposed(module) else 0, pieces)
        if module.bias is not None:
            self._split(module.bias, 0, pieces)
        vars(module)[key] = whole if gathers else length * part.packed
        if gathers:
            vars(module)["_farandole_lengths"] = (length,) * size

    def _cut_vocabulary(self, module: Any, whole: dict[str, Any]) -> None:
        count = whole["num_embeddings" if isinstance(module, nn.Embedding) else "out_features"]
        lengths = spread(count, self.ranks.size)
        start, length = sum(lengths[: self.ranks.rank]), lengths[self.ranks.rank]
        self._split(module.weight, 0, [(start, length)])
        if getattr(module, "bias", None) is not None:
            self._split(module.bias, 0, [(start, length)])
        vars(module).update(_farandole_lengths=lengths, _farandole_start=start)

    def _cut_attention(self, name: str, module: Any) -> None:
        size, rank = self.ranks.size, self.ranks.rank
        heads = even(module.num_heads, size, f"{name}: num_heads")
        width, length = module.embed_dim, heads * module.head_dim
        pieces = [(at * width + rank * length, length) for at in range(3)]
        if module.in_proj_weight is not None:
            self._split(module.in_proj_weight, 0, pieces)
        else:
            for each in (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight):
                self._split(each, 0, pieces[:1])
        if module.in_proj_bias is not None:
            self._split(module.in_proj_bias, 0, pieces)
        for each in (module.bias_k, module.bias_v):
            if each is not None:
                self._split(each, 2, pieces[:1])
        self._split(module.out_proj.weight, 1, pieces[:1])
        module.num_heads = heads

    def _split(self, parameter: nn.Parameter, dim: int, pieces: list[tuple[int, int]]) -> None:
        known = split_of(parameter)
        if known is not None:  # it is one with a parameter of another layer
            if (known.dim, known.pieces) != (dim, tuple(pieces)):
                raise PlanError(
                    f"plan: tensor: a parameter of shape {list(known.shape)} is one of several layers', which "
                    "split it in different ways",
                    remedy='give them one kind by tensor_recipe, such as "vocabulary"',
                )
            return
        split_in_place(parameter, Split(tuple(parameter.shape), dim, tuple(pieces), DEGREE), self.optimizers)


def _split_dim(module: nn.Module, part: LayerPart | None, key: str) -> int | None:
    """Return the dimension along which a parameter of a layer is split; None: it stays whole."""
    if part is None or part.kind == "whole":
        return None
    if isinstance(module, nn.MultiheadAttention) or part.kind == "attention":
        return 2 if key in ("bias_k", "bias_v") else 0
    if isinstance(module, nn.Embedding):
        return 1 if part.kind == "columns" else 0
    if key == "bias":
        return None if part.kind == "rows" else 0
    return int((part.kind == "rows") != is_transposed(module))


_INPUT = {False: "in_features", True: "nx"}
_OUTPUT = {False: "out_features", True: "nf"}
"""The attributes of torch's Linear, and of transformers' Conv1D."""


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that may be changed, as they are."""
    names = ("in_features", "out_features", "nx", "nf", "num_embeddings", "embedding_dim", "num_heads")
    return {name: vars(module)[name] for name in names if name in vars(module)}


def divide_attributes(model: nn.Module, recipe: TensorRecipe, size: int) -> None:
    """Divide the whole numbers of modules that the recipe names; they are kept as they were beside them."""
    for name, numbers in recipe.attributes.items():
        module = model.get_submodule(name)
        for key, value in numbers.items():
            vars(module)[key] = even(value, size, f"{name}.{key}" if name else key)
        vars(module)["_farandole_numbers"] = dict(numbers)
