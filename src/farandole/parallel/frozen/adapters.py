"""`fd.low_rank_adapters`: trainable low-rank matrices beside linear layers, in place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ...core.vocabulary.errors import ConfigError

DOWN, UP = "adapter_down", "adapter_up"


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
        patterns: of names of `torch.nn.Linear` layers, such as ``"*.attention.*"``; each must match one.
        rank: rows of ``adapter_down``, at least 1 and at most what the layer has features.
        alpha: scale of the adapters' output, times 1 / rank.

    Returns:
        The new parameters, for the optimizer.

    Raises:
        ConfigError: a pattern matches no linear layer, a layer has adapters already or is one whose forward is not
            called (the output projection of `torch.nn.MultiheadAttention`), or a number is out of range.
    """
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    layers = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in layers):
            raise _wrong(f"the pattern {pattern!r} matches none of {len(layers)} Linear layers")
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
        if hasattr(layer, DOWN):
            raise _wrong(f"{name!r} has adapters already")
        if isinstance(layer, NonDynamicallyQuantizableLinear):
            raise _wrong(f"the forward of {name!r} is never called, so adapters would do nothing")
        if rank > min(layer.in_features, layer.out_features):
            raise _wrong(f"rank = {rank} is above the features of {name!r}, a {layer}")
    made = []
    for layer in chosen.values():
        made += _add(layer, rank, alpha / rank)
    return made


def _add(layer: nn.Linear, rank: int, scale: float) -> list[nn.Parameter]:
    like: dict[str, Any] = {"dtype": layer.weight.dtype, "device": layer.weight.device}
    down = nn.Parameter(torch.empty(rank, layer.in_features, **like))
    up = nn.Parameter(torch.zeros(layer.out_features, rank, **like))
    nn.init.kaiming_uniform_(down, a=math.sqrt(5))
    layer.register_parameter(DOWN, down)
    layer.register_parameter(UP, up)
    layer.register_forward_hook(_Adapt(scale))
    return [down, up]


class _Adapt:
    """A forward hook that adds the adapters' output; without a reference to the layer, so that copies work."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def __call__(self, layer: nn.Module, arguments: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        inner = functional.linear(arguments[0], layer.get_parameter(DOWN))
        return output + functional.linear(inner, layer.get_parameter(UP)) * self._scale


def _wrong(what: str) -> ConfigError:
    return ConfigError(f"low_rank_adapters: {what}")
