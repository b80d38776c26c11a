"""Which models and optimizers a server can train, and such an optimizer as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from ....core.vocabulary.errors import ConfigError
from ....core.vocabulary.spec import Plan
from ....core.vocabulary.sync_spec import SyncSpec

_NOT_BY_RATE = ("Rprop",)
"""Optimizers whose step does not grow with the learning rate."""


@dataclass(frozen=True)
class TrainedParameter:
    """A parameter that trains."""

    parameter: torch.Tensor
    optimizer: int
    group: int


def parameters_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[TrainedParameter]:
    """Return the parameters of `model` that train, in its order. Raises `ConfigError` for one of 2 optimizers."""
    found: dict[int, tuple[int, int]] = {}
    for number, optimizer in enumerate(optimizers):
        for group, each in enumerate(optimizer.param_groups):
            for parameter in each["params"]:
                if id(parameter) in found:
                    raise ConfigError(
                        f"optimizers {found[id(parameter)][0]} and {number} have the same parameter of shape "
                        f"{list(parameter.shape)}: a server runs one optimizer over it",
                        remedy="give each parameter to one optimizer",
                    )
                found[id(parameter)] = number, group
    placed = [TrainedParameter(p, *found[id(p)]) for p in model.parameters() if p.requires_grad and id(p) in found]
    if not placed:
        raise ConfigError("no parameter of the model trains: there is nothing for a server to hold")
    return placed


def refuse_model(
    model: nn.Module, optimizers: Sequence[Optimizer], plan: Plan, why_not: Callable[[Optimizer], str]
) -> None:
    """Raise `ConfigError`, on all ranks alike, for what a server cannot train as one process would."""
    spec = SyncSpec.parse(plan.sync)
    for optimizer in optimizers:
        name = class_name(optimizer)
        why = why_not(optimizer)
        if why:
            raise ConfigError(
                f'plan: sync = "{plan.sync}" with {name}: {why}, and servers hold parts of parameters',
                remedy="use an optimizer that works element by element, such as AdamW or SGD",
            )
        if spec.staleness != 0 and name in _NOT_BY_RATE:
            raise ConfigError(
                f'plan: sync = "{plan.sync}" with {name}, whose steps do not grow with the learning rate: '
                "they would be as large for the gradients of one rank as for those of all",
                remedy='use another optimizer, or sync = "server:staleness=0"',
            )
        for group in optimizer.param_groups:
            write_group(group)
    running = next((name for name, each in model.named_modules()
                    if isinstance(each, _BatchNorm) and each.track_running_stats), None)  # fmt: skip
    if running is not None and plan.buffers != "local":
        raise ConfigError(
            f'plan: sync = "{plan.sync}" with the running statistics of {running!r}, which servers do not hold',
            remedy='set buffers = "local": each rank keeps its own statistics; or use GroupNorm',
        )


# A torch optimizer as JSON: its class by name and what its groups say; no code travels.


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
