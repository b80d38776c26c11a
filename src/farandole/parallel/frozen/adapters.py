"""`fd.low_rank_adapters`: trainable low-rank matrices beside linear layers, in place."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.text import nearest
from ..changed_class import features_of, is_transposed, plain_class_of

DOWN, UP = "adapter_down", "adapter_up"
_NAMES = 6
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
    kinds = ", ".join(f"{count} {kind}" for kind, count in matching.most_common(_NAMES))
    inside = f"{pattern}.*"
    remedy = f"there are: {', '.join(layers[:_NAMES]) or 'none'}"
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
