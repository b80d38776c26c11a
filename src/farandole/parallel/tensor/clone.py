"""Copies for the proof: of a module, split as it is and whole as it was, without hooks; and of its arguments.

The values of parameters are drawn, and all of them train: where a branch begins at zero, or is frozen, equal
gradients would prove nothing.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten

from ..changed_class import plain_class_of
from ..lower_precision import map_tensors
from ..split import mark_split, split_of
from .lazy import LazyWhole
from .regions import DEGREE
from .split_layers import SplitLayer

_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


class OwnHook:
    """A hook of tensor parallelism: it belongs to the split module, and to copies of it."""

    is_part_of_forward = False
    """Whether the split module needs it to compute what it does."""
    is_first = False
    """Whether it must get a module's arguments before FSDP2, which would gather those that look whole."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnHook:
        return self


def clone(module: nn.Module, *, whole: bool) -> nn.Module:
    """Return a copy of `module` in evaluation mode; its values are drawn, for both kinds and all ranks alike."""
    tensors: dict[int, Any] = {}
    for name, parameter in module.named_parameters():
        tensors[id(parameter)] = _drawn_parameter(name, parameter, whole)
    for buffer in module.buffers():
        tensors[id(buffer)] = buffer.detach().clone()
        if buffer.is_floating_point() and not buffer.any():  # a gate that is closed
            tensors[id(buffer)].fill_(1.0)
    return _clone(module, tensors, {}, whole)


def _drawn_parameter(name: str, parameter: torch.Tensor, whole: bool) -> torch.Tensor:
    if not parameter.is_floating_point() or type(parameter.data) not in (torch.Tensor, DTensor):
        return nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)  # in few bits
    split = split_of(parameter)
    is_part = split is not None and split.degree == DEGREE
    values = drawn(split.shape if split is not None and is_part else parameter.shape, name)
    if split is not None and is_part and not whole:
        values = split.take(values)
    made = nn.Parameter(values.to(parameter.device, parameter.dtype))
    if split is not None and not whole:
        mark_split(made, split)
    return made


def drawn(shape: Sequence[int], name: str) -> torch.Tensor:
    """Return float32 values of the size that weights have: matrices keep the size of what they are applied to."""
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    if len(shape) < 2:  # scales and biases: none is near zero
        return torch.rand(tuple(shape), generator=generator) + 0.5
    return torch.randn(tuple(shape), generator=generator).mul_(shape[-1] ** -0.5)


def _clone(module: nn.Module, tensors: dict[int, Any], memo: dict[int, nn.Module], whole: bool) -> nn.Module:
    if id(module) in memo:
        return memo[id(module)]
    kind = plain_class_of(module) if whole and isinstance(module, SplitLayer) else type(module)
    if issubclass(kind, FSDPModule):
        kind = kind.__mro__[kind.__mro__.index(FSDPModule) + 1]
    made: nn.Module = kind.__new__(kind)
    memo[id(module)] = made
    state = dict(vars(module))
    if whole:
        state.update(state.get("_farandole_whole", {}))
        state.update(state.get("_farandole_numbers", {}))
    state["training"] = False
    for name in _HOOKS:
        state[name] = OrderedDict(
            (key, hook) for key, hook in state.get(name, {}).items() if _stays(hook, module, key, whole)
        )
    for name in ("_parameters", "_buffers"):
        state[name] = {key: value if value is None else tensors[id(value)] for key, value in state[name].items()}
    state["_modules"] = {
        key: value if value is None else _clone(value, tensors, memo, whole)
        for key, value in state["_modules"].items()
    }
    vars(made).update(state)
    return made


def _stays(hook: Any, module: nn.Module, key: int, whole: bool) -> bool:
    """Return whether a hook stays: ours that compute do; ``_with_kwargs`` and the like mark by keys."""
    if isinstance(hook, bool):
        hook = module._forward_pre_hooks.get(key) or module._forward_hooks.get(key)
    if isinstance(hook, OwnHook):
        return hook.is_part_of_forward and not whole
    return type(hook).__module__ in ("farandole.parallel.frozen_weight", "farandole.parallel.frozen_model")


def detached(values: Any, dtype: torch.dtype | None) -> Any:
    """Return nested `values` with tensors of their own; those in float are of `dtype`, and leaves of a graph."""
    if isinstance(values, torch.Tensor):
        found = values.detach().clone()
        if found.is_floating_point():
            found = found.to(dtype or found.dtype).requires_grad_(values.requires_grad)
        return found
    if isinstance(values, (list, tuple)) and type(values) in (list, tuple):
        return type(values)(detached(each, dtype) for each in values)
    if type(values) is dict:
        return {key: detached(each, dtype) for key, each in values.items()}
    try:
        return copy.deepcopy(values)  # caches of keys and values grow with every call
    except Exception:  # anything may be an argument; what has no copy is given as it is
        return values


def first_samples(args: Any, kwargs: Any, count: int | None) -> Any:
    """Return the first `count` samples of tensors whose first dimension is that of the first tensor; None: all."""
    tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor) and each.dim()]
    if not tensors:
        return args, kwargs
    batch = tensors[0].shape[0]

    def cut(value: torch.Tensor) -> torch.Tensor:
        value = value.whole() if isinstance(value, LazyWhole) else value
        return value[:count] if value.dim() > 1 and value.shape[0] == batch else value

    return map_tensors((args, kwargs), cut)


def varied(args: Any, kwargs: Any) -> Any:
    """Return the arguments with drawn values added to the activation: a branch before it may begin at zero."""
    values = tree_flatten((args, kwargs))[0]
    at = next((each for each in values if isinstance(each, torch.Tensor) and each.is_floating_point()), None)
    if at is None:
        return args, kwargs
    size = float(at.detach().float().std(correction=0)) if at.numel() else 0.0
    noise = drawn((*at.shape, 1), "input").squeeze(-1) * (size if 0 < size < math.inf else 1.0)
    moved = (at.detach() + noise.to(at)).requires_grad_(at.requires_grad)
    return map_tensors((args, kwargs), lambda each: moved if each is at else each)
