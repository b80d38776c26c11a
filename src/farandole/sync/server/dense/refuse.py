"""Which models and optimizers a server can train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from ....core.vocabulary.errors import ConfigError
from ....core.vocabulary.spec import Plan
from ....core.vocabulary.sync_spec import SyncSpec
from .hyperparameters import class_name, write_group

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
