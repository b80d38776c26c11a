"""Copies of a module for the proof: split as it is, and whole as it was; with own parameters, without hooks."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..changed_class import plain_class_of
from ..split import mark_split, split_of
from .cut import gather_parameter
from .layers.ranks import TensorRanks
from .layers.split_layers import SplitLayer

_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


class OwnHook:
    """A hook of tensor parallelism: it belongs to the split module, and to copies of it."""

    is_part_of_forward = False
    """Whether the split module needs it to compute what it does."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnHook:
        return self


def clone(module: nn.Module, ranks: TensorRanks, *, whole: bool) -> nn.Module:
    """Return a copy of `module` in evaluation mode, of the same values; a collective if it is to be `whole`."""
    tensors: dict[int, Any] = {}
    for name, parameter in module.named_parameters():
        values = gather_parameter(parameter, ranks, name) if whole else parameter.detach().clone()
        made = tensors[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
        split = split_of(parameter)
        if split is not None and not whole:
            mark_split(made, split)
    for buffer in module.buffers():
        tensors[id(buffer)] = buffer.detach().clone()
    return _clone(module, tensors, {}, whole)


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
    return type(hook).__module__.startswith("farandole.parallel.frozen")


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
