"""The plan key `frozen_codec`: weights that do not train are stored in few bits, in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...core.host.heap import trim_heap
from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.spec import Plan
from .block_codes import FORMS
from .frozen_weight import FrozenWeight, as_parameter

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_KINDS = (nn.Linear, nn.Embedding)
Place = tuple[nn.Module, str, str]
"""A module, the name of a parameter in it, and its name in the model."""


def encode_frozen(here: World, model: nn.Module, optimizers: Sequence[Optimizer], plan: Plan) -> None:
    """Replace the frozen weights of linear layers and embeddings by `FrozenWeight`, on all ranks alike.

    Raises `PlanError`, on every rank, if there is none, or one of them holds NaN or infinity.
    """
    if plan.frozen_codec not in FORMS:
        return
    found = dict(frozen_weights(model))
    problem = ""
    if not found and not any(isinstance(each, FrozenWeight) for each in model.parameters()):
        problem = "no weight of a Linear or Embedding layer is frozen" + _other_dtypes(model)
    for weight, places in found.items():
        if not bool(torch.isfinite(weight).all()):
            problem = f"{places[0][2]!r} holds NaN or infinity"
    answers = [answer for answer in all_gather_json(here, "frozen weights", problem) if answer]
    if answers:
        raise PlanError(
            f'plan: frozen_codec = "{plan.frozen_codec}", but {answers[0]}',
            remedy="call requires_grad_(False) for what is not to train, before fd.distribute",
        )
    encode_weights(found, plan.frozen_codec, optimizers)


@torch.no_grad()
def encode_weights(found: dict[torch.Tensor, list[Place]], codec: str, optimizers: Sequence[Optimizer]) -> None:
    """Replace weights by `FrozenWeight` where they are, and in `optimizers`. Empties `found`, to free each."""
    while found:
        weight, places = found.popitem()
        made = as_parameter(FrozenWeight.encode(weight, codec))
        for module, name, _ in places:
            module.register_parameter(name, made)
        _replace(optimizers, weight, made)
        del weight, made
        trim_heap()  # what a weight took is in many pieces of the heap, and would stay this process's


def stored_tensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return `tensors`, with what is stored of frozen weights in their place."""
    return [
        part
        for each in tensors
        for part in ((each.packed, each.scales) if isinstance(each, FrozenWeight) else (each,))
    ]


def frozen_weights(model: nn.Module) -> Iterator[tuple[torch.Tensor, list[Place]]]:
    """Yield each frozen parameter with the modules that have it; none of them if one is of another kind."""
    owners: dict[nn.Parameter, list[Place]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(parameter, []).append((module, name, f"{prefix}.{name}" if prefix else name))
    for parameter, places in owners.items():
        if not parameter.requires_grad and all(_fits(module, name, parameter) for module, name, _ in places):
            yield parameter, places


def _fits(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    plain = type(parameter) is nn.Parameter and parameter.dtype in _DTYPES and parameter.layout == torch.strided
    is_normed = isinstance(module, nn.Embedding) and module.max_norm is not None
    return plain and isinstance(module, _KINDS) and name == "weight" and not is_normed


def _other_dtypes(model: nn.Module) -> str:
    """Say that weights would be stored if they had another dtype."""
    weights = [each.weight for each in model.modules() if isinstance(each, _KINDS)]
    found = {str(each.dtype) for each in weights if not each.requires_grad and each.dtype not in _DTYPES}
    return f" in {', '.join(map(str, _DTYPES))}: they are {', '.join(sorted(found))}" if found else ""


def _replace(optimizers: Sequence[Optimizer], old: torch.Tensor, new: nn.Parameter) -> None:
    """Let optimizers that hold a frozen weight, which they never change, hold the new one."""
    for optimizer in optimizers:
        optimizer.state.pop(old, None)
        for group in optimizer.param_groups:
            group["params"] = [new if each is old else each for each in group["params"]]
