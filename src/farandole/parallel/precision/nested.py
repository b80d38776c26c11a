"""Containers of tensors, rebuilt with other tensors: the arguments and the output of a forward pass."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `value` with `change` applied to each tensor in it; what holds none is returned as it is.

    Goes through lists, tuples, named tuples, mappings and dataclasses. Other objects are left alone.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        parts = [map_tensors(part, change) for part in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, Mapping):
        return _map_mapping(value, change)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(value, change)
    return value


def _map_mapping(value: Mapping[Any, Any], change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    changed = {}
    for key, part in value.items():
        new = map_tensors(part, change)
        if new is not part:
            changed[key] = new
    if not changed:
        return value
    if not isinstance(value, MutableMapping):
        return {**value, **changed}
    result = copy.copy(value)
    for key, part in changed.items():
        result[key] = part
    return result


def _map_dataclass(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    changed = {}
    for field in dataclasses.fields(value):
        part = getattr(value, field.name, None)
        new = map_tensors(part, change)
        if new is not part:
            changed[field.name] = new
    if not changed:
        return value
    result = copy.copy(value)
    for name, part in changed.items():
        object.__setattr__(result, name, part)  # it may be frozen
    return result
