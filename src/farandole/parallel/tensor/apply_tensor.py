"""The plan keys `tensor`, `tensor_recipe` and `sequence_parallel`: layers split over ranks, in place."""

from __future__ import annotations

import re
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.text import write_notice
from ..mesh import Mesh
from ..model import Strategy
from ..split import split_of
from .clone import OwnHook
from .cut import Cutter, Places, check_cuts, divide_attributes, find_places
from .proof import Proofs
from .recipe import (
    TensorRecipe,
    Units,
    add_by_name,
    add_head_counts,
    add_pairs,
    add_torch_layers,
    add_transformers,
    add_vocabulary,
    find_units,
    refuse_layers,
)
from .regions import DEGREE, RegionSeed, tensor_ranks
from .sequence import install_tokens, put_first
from .split_layers import inside

_LISTED = 8


@dataclass(frozen=True)
class TensorPlan:
    """What becomes of each layer of a model, and where it stands."""

    recipe: TensorRecipe
    unknown: list[str]
    """Styles of transformers that are not known."""
    units: Units
    places: Places
    seed: RegionSeed


def plan_tensor(model: nn.Module, plan: Plan, mesh: Mesh) -> TensorPlan:
    """Return how `model` would be split over the tensor ranks of `mesh`; nothing is sent or changed.

    Raises:
        PlanError: the recipe does not fit the model, or its sizes do not divide.
        ConfigError: a layer whose class cannot be changed.
    """
    size = mesh.size("tensor")
    recipe, unknown = find_recipe(model, plan)
    if not any(part.kind != "whole" for part in recipe.parts.values()):
        raise PlanError(
            f"plan: tensor = {size}, but no layer of this {type(model).__name__} is recognised",
            remedy='name layers by tensor_recipe, such as { "*.up" = "columns", "*.down" = "rows" }',
        )
    refuse_layers(model, recipe, plan)
    units = find_units(model, recipe)
    add_head_counts(recipe, model, units.gathers, size)
    seed = RegionSeed(mesh.here.device, mesh.rank("tensor"))
    places = find_places(model, recipe, units, seed, by_tokens=plan.sequence_parallel)
    check_cuts(model, recipe, units.gathers, size)
    return TensorPlan(recipe, unknown, units, places, seed)


class TensorParallel(Strategy):
    """The layers of a model, split over the tensor ranks of its mesh."""

    keys = ("tensor",)

    def check(self) -> None:
        """Raise what `plan_tensor` does."""
        self.call.divided_blocks = plan_tensor(self.model, self.plan, self.mesh).places.blocks

    def apply(self) -> None:
        """Split them, and prove each at its first pass."""
        model, cuts = self.model, plan_tensor(self.model, self.plan, self.mesh)
        recipe, units, places = cuts.recipe, cuts.units, cuts.places
        ranks = self.call.token_ranks = tensor_ranks(self.mesh)
        cutter = Cutter(model, ranks, self.optimizers)
        for name, part in recipe.parts.items():
            if part.kind != "whole":
                cutter.cut(name, part, places.of[name])
        divide_attributes(model, recipe, ranks.size)
        _turn_off_fused_paths(model)
        install_tokens(model, places.blocks, places.entries, ranks, cuts.seed)
        self.call.after_sharding = partial(put_first, model)
        proofs = self.distributed.proofs = Proofs(ranks, weakref.ref(model), cuts.seed)
        inside = tuple(f"{block}." for block in places.blocks)
        for name in [*places.blocks, *units.layers]:
            if not (name.startswith(inside or ("\0",)) or (name in places.blocks and name in proofs.names)):
                proofs.install(name, model.get_submodule(name))
        watch_first_forward(model)
        if self.mesh.here.rank == 0:
            write_notice(describe(model, recipe, cuts.unknown, ranks.size))


def _turn_off_fused_paths(model: nn.Module) -> None:
    """Let torch's transformer layers call their parts in evaluation too, instead of reading their weights."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def find_recipe(model: nn.Module, plan: Plan) -> tuple[TensorRecipe, list[str]]:
    """Return what becomes of each layer, and the styles of transformers that are not known."""
    recipe = TensorRecipe()
    add_by_name(recipe, model, plan.tensor_recipe)
    unknown = add_transformers(recipe, model)
    add_torch_layers(recipe, model)
    add_pairs(recipe, model)
    add_vocabulary(recipe, model)
    recipe.order_by(model)
    return recipe, unknown


def describe(model: nn.Module, recipe: TensorRecipe, unknown: list[str], size: int) -> str:
    """Return a text on what is split and by whose word, and on the layers with matrices that are whole."""
    split = [part.source for part in recipe.parts.values() if part.kind != "whole"]
    by = ", ".join(f"{split.count(each)} by {each}" for each in dict.fromkeys(split))
    text = f"tensor = {size}: {len(split)} layers are split ({by})"
    whole: dict[str, None] = {}
    for name, module in model.named_modules():
        matrices = [each for each in module.parameters(recurse=False) if each.dim() > 1]
        if matrices and all(split_of(each) is None for each in matrices):
            whole[re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) or type(model).__name__] = None
    if whole:
        names = list(whole)
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        text += f"; whole on every rank, because not recognised: {', '.join(names[:_LISTED])}{more}"
    if unknown:
        text += f"; styles of transformers that are not known here: {', '.join(unknown)}"
    return text


# Uses of split parameters outside of their layers, which know that they are split: an error.
#
# ``functional.linear(x, model.embedding.weight)`` would compute with this rank's part alone. The first forward
# pass of the model is watched by a torch function mode.


_T = torch.Tensor
_FACTS = {
    _T.size, _T.dim, _T.numel, _T.nelement, _T.is_floating_point, _T.is_complex, _T.element_size, _T.data_ptr,
    _T.stride, _T.is_contiguous, _T.register_hook, _T.register_post_accumulate_grad_hook, _T.__hash__,
    torch.is_floating_point, torch.is_complex, torch.numel, _T.is_inference, torch.is_inference,
}  # fmt: skip
"""What does not depend on values."""


class _Watch(TorchFunctionMode):
    def __init__(self, names: WeakIdKeyDictionary) -> None:
        super().__init__()
        self.names = names

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_compiled = isinstance(function, torch._ops.OpOverload)  # of a graph, in which layers are not seen
        is_fact = function in _FACTS or getattr(function, "__name__", "") == "__get__"
        if not (inside.depth or is_compiled or is_fact):
            for each in (*args, *kwargs.values()):
                if isinstance(each, nn.Parameter) and each in self.names:
                    raise _used_outside(self.names[each], function)
        return function(*args, **kwargs)


def _used_outside(name: str, function: Any) -> PlanError:
    what = getattr(function, "__name__", str(function))
    return PlanError(
        f"tensor: {name!r}, of which each rank has a part, goes to {what!r} outside of its layer",
        remedy=f'call the layer, or leave it whole: tensor_recipe = {{ "{name.rpartition(".")[0]}" = "whole" }}',
    )


class _BeginWatch(OwnHook):
    def __init__(self, names: WeakIdKeyDictionary) -> None:
        self.watch = _Watch(names)
        self.is_watching = self.is_done = False

    def __reduce__(self) -> Any:
        """A copy watches nothing: its class is the plain one, or the split layer's by itself."""
        return (_watch_nothing, ())

    def __call__(self, model: nn.Module, args: Any) -> None:
        if not self.is_watching and not self.is_done:
            self.is_watching = True
            self.watch.__enter__()


class _EndWatch(OwnHook):
    def __init__(self, begin: _BeginWatch) -> None:
        self.begin = begin

    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        if self.begin.is_watching:
            self.begin.is_watching = False
            self.begin.watch.__exit__(None, None, None)
            self.begin.is_done = True  # its hooks stay: torch goes through them while an error passes


def _watch_nothing() -> _BeginWatch:
    made = _BeginWatch(WeakIdKeyDictionary())
    made.is_done = True
    return made


def watch_first_forward(model: nn.Module) -> None:
    """Raise `PlanError` in the first forward pass of `model` if it uses a split parameter outside of its layer."""
    names = WeakIdKeyDictionary()
    for name, each in model.named_parameters():
        split = split_of(each)
        if split is not None and split.degree == DEGREE:
            names[each] = name
    begin = _BeginWatch(names)
    model.register_forward_pre_hook(begin)
    model.register_forward_hook(_EndWatch(begin), always_call=True)
