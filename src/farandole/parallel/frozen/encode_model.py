"""The plan key `frozen_codec`: weights that do not train are stored in few bits, in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...core.host.process_status import trim_heap
from ...core.vocabulary.codec_spec import NONE
from ...core.vocabulary.errors import ConfigError, PlanError
from ...core.vocabulary.text import write_notice
from ..changed_class import is_transposed, plain_class_of
from ..model import Strategy
from .frozen_weight import FORMS, FrozenWeight, as_parameter

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_KINDS = (nn.Parameter, FakeTensor)
"""Parameters as users make them, and those of an estimate."""
_NOTABLE_SHARE = 0.1
"""What is less of the frozen bytes, or of those of the kind of layers that has most, is not said."""
_NAMES = 4
"""Kinds of layers that a line lists at most."""
Place = tuple[nn.Module, str, str]
"""A module, the name of a parameter in it, and its name in the model."""


class FrozenWeights(Strategy):
    """The plan key `frozen_codec`: weights of linear layers and embeddings become `FrozenWeight`, on all ranks."""

    keys = ("frozen_codec",)

    def is_asked(self) -> bool:
        """Also where `freeze` has stored weights before."""
        return super().is_asked() or self._is_stored()

    def check(self) -> None:
        """Raise `PlanError`, on every rank, if there is nothing to store, or a weight holds NaN or infinity."""
        codec = self.plan.frozen_codec
        if codec in FORMS:
            found = dict(frozen_weights(self.model))
            _refuse(self.mesh.here, found, codec, "" if found or self._is_stored() else _none_fits(self.model))

    def prepare(self) -> None:
        """Store them. Rank 0 says which kinds of layers keep a notable share of the frozen bytes as they are."""
        codec = self.plan.frozen_codec
        if codec in FORMS:
            encode_weights(dict(frozen_weights(self.model)), codec, self.optimizers)
        line = what_stays(self.model)
        if line and self.mesh.here.rank == 0:
            write_notice(f"{'frozen_codec' if codec in FORMS else 'freeze'}: {line}")

    def _is_stored(self) -> bool:
        return any(isinstance(each, FrozenWeight) for each in self.model.parameters())


def _refuse(here: World, found: dict[torch.Tensor, list[Place]], codec: str, problem: str) -> None:
    for weight, places in found.items():
        if not bool(torch.isfinite(weight).all()):
            problem = f"{places[0][2]!r} holds NaN or infinity"
    answers = [answer for answer in all_gather_json(here, "frozen weights", problem) if answer]
    if answers:
        raise PlanError(
            f'plan: frozen_codec = "{codec}", but {answers[0]}',
            remedy="call requires_grad_(False) for what is not to train, before fd.distribute",
        )


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
    for parameter, places in _all_frozen(model):
        if all(_fits(module, name, parameter) for module, name, _ in places):
            yield parameter, places


def what_stays(model: nn.Module) -> str:
    """Say which share of the frozen bytes cannot be in few bits, and of which layers; "" for a small one."""
    whole_bytes, kinds = 0, Counter[str]()
    for parameter, places in _all_frozen(model):
        parameter_bytes = parameter.numel() * parameter.element_size()
        whole_bytes += parameter_bytes
        others = [place for place in places if not _fits(place[0], place[1], parameter)]
        if others and not isinstance(parameter, FrozenWeight):
            kinds[_describe(others[0], parameter)] += parameter_bytes
    if kinds.total() <= _NOTABLE_SHARE * whole_bytes:
        return ""
    most = max(kinds.values())
    listed = ", ".join(kind for kind, each in kinds.most_common(_NAMES) if each >= _NOTABLE_SHARE * most)
    return f"{100 * kinds.total() / whole_bytes:.0f} % of the frozen bytes stay as they are: {listed}"


def _all_frozen(model: nn.Module) -> Iterator[tuple[nn.Parameter, list[Place]]]:
    owners: dict[nn.Parameter, list[Place]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(parameter, []).append((module, name, f"{prefix}.{name}" if prefix else name))
    return ((parameter, places) for parameter, places in owners.items() if not parameter.requires_grad)


def _describe(place: Place, parameter: nn.Parameter) -> str:
    """Return the kind of a layer, with what distinguishes its parameter from one that would be stored."""
    module, name, _ = place
    kind = plain_class_of(module).__name__
    if name != "weight":
        return f"{kind}.{name}"
    if not _stores(module):
        return kind
    return f"{kind} with max_norm" if _is_plain(parameter) else f"{kind} in {parameter.dtype}"


def _stores(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, nn.Embedding)) or is_transposed(module)


def _fits(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    is_normed = isinstance(module, nn.Embedding) and module.max_norm is not None
    return _is_plain(parameter) and _stores(module) and name == "weight" and not is_normed


def _is_plain(parameter: nn.Parameter) -> bool:
    return type(parameter) in _KINDS and parameter.dtype in _DTYPES and parameter.layout == torch.strided


def _none_fits(model: nn.Module) -> str:
    """Say what is missing, and of which dtype weights are that would be stored if they had another."""
    layers: list[Any] = [each for each in model.modules() if _stores(each)]
    weights = [each.weight for each in layers]
    found = {str(each.dtype) for each in weights if not each.requires_grad and each.dtype not in _DTYPES}
    others = f" in {', '.join(map(str, _DTYPES))}: they are {', '.join(sorted(found))}" if found else ""
    return f"no weight of a Linear, Embedding or Conv1D layer is frozen{others}"


def _replace(optimizers: Sequence[Optimizer], old: torch.Tensor, new: nn.Parameter) -> None:
    """Let optimizers that hold a frozen weight, which they never change, hold the new one."""
    for optimizer in optimizers:
        optimizer.state.pop(old, None)
        for group in optimizer.param_groups:
            group["params"] = [new if each is old else each for each in group["params"]]


# `fd.freeze`: a module whose weights train no more, stored in few bits as soon as it is made.

M = TypeVar("M", bound=nn.Module)


def freeze(module: M, codec: Literal["none", "int8", "int4"] = "none") -> M:
    """Freeze `module`, and store its Linear, Embedding and transformers' Conv1D weights in few bits.

    What the plan key `frozen_codec` does to a whole model when it is distributed, for a part of one while the
    model is made: a model whose weights do not fit in memory can be made layer by layer. Exchanges nothing: the
    ranks' weights are made equal by `fd.distribute`.

    Args:
        module: changed in place; its parameters require no gradient from now on.
        codec: "int8" or "int4", in blocks with a scale each; "none" keeps the weights as they are.

    Returns:
        The same module.

    Raises:
        ConfigError: another codec, or a weight that holds NaN or infinity; nothing is changed then.
    """
    if codec not in (NONE, *FORMS):
        raise ConfigError(f"freeze: codec = {codec!r}, expected none, {' or '.join(FORMS)}")
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    module.requires_grad_(False)
    if codec == NONE:
        return module
    found = dict(frozen_weights(module))
    for weight, places in found.items():
        if not bool(torch.isfinite(weight).all()):
            for parameter in trained:
                parameter.requires_grad_(True)
            raise ConfigError(
                f"freeze: {places[0][2]!r} holds NaN or infinity", remedy="load the weights before freezing them"
            )
    encode_weights(found, codec, ())
    return module
