"""The plan key `frozen_codec`: weights that do not train are stored in few bits, in place."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.optim import Optimizer

from ..comm.world.store_sync import all_gather_json
from ..comm.world.world import World
from ..core.host.process_status import trim_heap
from ..core.vocabulary.codec_spec import NONE
from ..core.vocabulary.errors import ConfigError, PlanError
from ..core.vocabulary.text import nearest, write_notice
from .changed_class import features_of, is_transposed, plain_class_of
from .frozen_weight import FORMS, FrozenWeight, as_parameter
from .model import Strategy

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


# `fd.low_rank_adapters`: trainable low-rank matrices beside linear layers, in place.


DOWN, UP = "adapter_down", "adapter_up"
_ADAPTED_NAMES = 6
"""Names that an error lists at most."""


def low_rank_adapters(
    model: nn.Module, patterns: str | Sequence[str], *, rank: int = 8, alpha: float = 16.0
) -> list[nn.Parameter]:
    """Add trainable low-rank adapters to linear layers: ``y + alpha / rank * up(down(x))``.

    LoRA of Hu et al. 2021, section 4.1. Nothing is wrapped: a layer gets the parameters ``adapter_down``,
    ``[rank, in_features]``, and ``adapter_up``, ``[out_features, rank]``, which is zero, so the model computes
    what it did. The layers' own weights are left as they are: freeze them before, and call this before
    `fd.distribute`.

    Args:
        model: the model, changed in place.
        patterns: of names of linear layers, such as ``"*.attention.*"``; each must match one. A linear layer is a
            `torch.nn.Linear` or transformers' ``Conv1D``, that of GPT-2.
        rank: rows of ``adapter_down``, at least 1 and at most what the layer has features.
        alpha: scale of the adapters' output, times 1 / rank.

    Returns:
        The new parameters, for the optimizer.

    Raises:
        ConfigError: a pattern matches no linear layer, a layer has adapters already or is one whose forward is not
            called (the output projection of `torch.nn.MultiheadAttention`), or a number is out of range.
    """
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    layers = {name: each for name, each in model.named_modules() if _is_linear(each)}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in layers):
            raise _no_match(pattern, model, list(layers))
    if not patterns:
        raise _wrong("no pattern is given")
    if not isinstance(rank, int) or rank < 1 or not (0 < alpha < math.inf):
        raise _wrong(
            f"rank = {rank!r} and alpha = {alpha!r}, expected a whole number from 1, and a positive number"
        )
    chosen = {
        name: each for name, each in layers.items() if any(fnmatchcase(name, pattern) for pattern in patterns)
    }
    for name, layer in chosen.items():
        if problem := _why_not(name, layer, rank):
            raise _wrong(problem)
    made = []
    for layer in chosen.values():
        made += _add(layer, rank, alpha / rank)
    return made


def adaptable(model: nn.Module, rank: int) -> list[str]:
    """Return the names of the linear layers that can take adapters of this rank."""
    layers = {name: each for name, each in model.named_modules() if _is_linear(each)}
    return [name for name, layer in layers.items() if not _why_not(name, layer, rank)]


def _why_not(name: str, layer: nn.Module, rank: int) -> str:
    """Say why a linear layer cannot take adapters; "" if it can."""
    if hasattr(layer, DOWN):
        return f"{name!r} has adapters already"
    if isinstance(layer, NonDynamicallyQuantizableLinear):
        return f"the forward of {name!r} is never called, so adapters would do nothing"
    return f"rank = {rank} is above the features of {name!r}, a {layer}" if rank > min(features_of(layer)) else ""


def _is_linear(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) or is_transposed(layer)


def _add(layer: Any, rank: int, scale: float) -> list[nn.Parameter]:
    inputs, outputs = features_of(layer)
    like: dict[str, Any] = {"dtype": layer.weight.dtype, "device": layer.weight.device}
    down = nn.Parameter(torch.empty(rank, inputs, **like))
    up = nn.Parameter(torch.zeros(outputs, rank, **like))
    nn.init.kaiming_uniform_(down, a=math.sqrt(5))
    layer.register_parameter(DOWN, down)
    layer.register_parameter(UP, up)
    layer.register_forward_hook(_Adapt(scale), with_kwargs=True)
    return [down, up]


class _Adapt:
    """A forward hook that adds the adapters' output; without a reference to the layer, so that copies work."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def __call__(
        self, layer: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: torch.Tensor
    ) -> torch.Tensor:
        (x,) = (*arguments, *named.values())
        inner = functional.linear(x, layer.get_parameter(DOWN))
        return output + functional.linear(inner, layer.get_parameter(UP)) * self._scale


def _no_match(pattern: str, model: nn.Module, layers: list[str]) -> ConfigError:
    """Name the kinds of modules that match, and the layers that could have been meant."""
    matching = Counter(
        plain_class_of(each).__name__ for name, each in model.named_modules() if fnmatchcase(name, pattern)
    )
    kinds = ", ".join(f"{count} {kind}" for kind, count in matching.most_common(_ADAPTED_NAMES))
    inside = f"{pattern}.*"
    remedy = f"there are: {', '.join(layers[:_ADAPTED_NAMES]) or 'none'}"
    if any(fnmatchcase(name, inside) for name in layers):
        remedy = f"did you mean {inside!r}?"
    elif (near := nearest(pattern, layers)) is not None:
        remedy = f"did you mean {near!r}?"
    return _wrong(
        f"the pattern {pattern!r} matches none of {len(layers)} linear layers (Linear, transformers' Conv1D); it "
        f"matches {kinds or 'no module at all'}",
        remedy,
    )


def _wrong(what: str, remedy: str = "") -> ConfigError:
    return ConfigError(f"low_rank_adapters: {what}", remedy=remedy)
