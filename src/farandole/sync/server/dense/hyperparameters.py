"""A torch optimizer as JSON: its class by name and what its groups say; no code travels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch.optim import Optimizer

from ....core.vocabulary.errors import ConfigError

_NOT_SENT: Final = ("params", "param_names")
_HOW_IT_RUNS: Final = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}
"""Keys that say how a device carries a step out, and not what it does."""


def class_name(optimizer: Optimizer) -> str:
    """Return the name of an optimizer's class in `torch.optim`; raise `ConfigError` for any other class."""
    kind = type(optimizer)
    if getattr(torch.optim, kind.__name__, None) is not kind:
        raise ConfigError(
            f"a server cannot run {kind.__module__}.{kind.__qualname__}: expected a class of torch.optim",
            remedy="use one of torch.optim's, or leave sync out of the plan",
        )
    return str(kind.__name__)


def write_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a group of parameters says now, as JSON; raise `ConfigError` for what JSON has not."""
    return {key: _plain(key, value) for key, value in group.items() if key not in _NOT_SENT}


def read_group(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `write_group` was given, for a step on a CPU."""
    return {
        key: _HOW_IT_RUNS[key] if key in _HOW_IT_RUNS else tuple(value) if isinstance(value, list) else value
        for key, value in said.items()
    }


def make_optimizer(
    name: str, parameters: list[list[torch.nn.Parameter]], groups: list[dict[str, Any]]
) -> Optimizer:
    """Make an optimizer of `torch.optim` whose groups have `parameters`, one list each."""
    kind: Any = getattr(torch.optim, name, None)
    if not isinstance(kind, type) or not issubclass(kind, Optimizer):
        raise ConfigError(f"{name!r} is no class of torch.optim")
    make: Any = kind
    made: Optimizer = make(
        [{**read_group(said), "params": each} for said, each in zip(groups, parameters, strict=True)]
    )
    return made


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_plain(key, each) for each in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ConfigError(f"a server cannot run an optimizer with {key} = {value!r}: expected numbers, texts or None")
