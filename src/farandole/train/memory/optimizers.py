"""What optimizers keep and need: found by a step of each on small tensors, and not by a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.text import did_you_mean
from ...plan.memory import OptimizerFacts
from .fake_pass import LiveStorages


class _Named(NamedTuple):
    kind: type[torch.optim.Optimizer]
    options: Mapping[str, Any] = {}


OPTIMIZERS = {
    "adam": _Named(torch.optim.Adam),
    "adamw": _Named(torch.optim.AdamW),
    "adamax": _Named(torch.optim.Adamax),
    "adagrad": _Named(torch.optim.Adagrad),
    "nadam": _Named(torch.optim.NAdam),
    "radam": _Named(torch.optim.RAdam),
    "rmsprop": _Named(torch.optim.RMSprop),
    "sgd": _Named(torch.optim.SGD),
    "sgd-momentum": _Named(torch.optim.SGD, {"momentum": 0.9}),
}
"""Optimizers of torch by name, with the options that change what they keep."""
_FEW, _MANY = 1024, 4096
"""Elements of the tensors that are stepped: their states differ by what depends on the number of elements."""


def make_optimizer(name: str, parameters: Iterable[torch.Tensor], **options: Any) -> torch.optim.Optimizer:
    """Return optimizer `name` of these parameters. Raises `ConfigError` for an unknown name."""
    if name not in OPTIMIZERS:
        raise ConfigError(f"optimizer {name!r} is not known", remedy=did_you_mean(name, OPTIMIZERS))
    make: Any = OPTIMIZERS[name].kind
    optimizer: torch.optim.Optimizer = make(parameters, lr=1e-3, **OPTIMIZERS[name].options, **options)
    return optimizer


def optimizer_facts(name: str, dtype: torch.dtype, device: str) -> OptimizerFacts:
    """Return what optimizer `name` keeps for parameters of `dtype`. Raises `ConfigError` for an unknown name.

    On a "cuda" device torch updates all parameters at once (foreach), which takes temporaries for all of them.
    """
    foreach = device == "cuda"
    few, many = (_step(name, elements, dtype, foreach) for elements in (_FEW, _MANY))
    per_element = (many.state_bytes - few.state_bytes) / (_MANY - _FEW)
    return OptimizerFacts(
        state_bytes_per_element=per_element,
        state_bytes_per_tensor=few.state_bytes - per_element * _FEW,
        temporary_bytes_per_element=(many.temporary_bytes - few.temporary_bytes) / (_MANY - _FEW),
        updates_at_once=foreach,
    )


def step_operations(name: str, device: str) -> int:
    """Return how many operations a step of optimizer `name` starts: on "cpu" for each tensor, else for all."""
    if device == "cuda":
        return _operations(name, 1, foreach=True)
    return _operations(name, 2, foreach=False) - _operations(name, 1, foreach=False)


def _operations(name: str, tensors: int, *, foreach: bool) -> int:
    parameters = [torch.nn.Parameter(torch.zeros(_FEW, dtype=torch.float32, device="cpu")) for _ in range(tensors)]
    for each in parameters:
        each.sum().backward()
    optimizer = make_optimizer(name, parameters, foreach=foreach)
    optimizer.step()  # makes the states
    counted = _CountedOperations()
    with counted:
        optimizer.step()
    return counted.count


class _CountedOperations(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one, and count it."""
        self.count += 1
        return operation(*args, **(kwargs or {}))


class _StepMemory(NamedTuple):
    state_bytes: int
    temporary_bytes: int


def _step(name: str, elements: int, dtype: torch.dtype, foreach: bool) -> _StepMemory:
    """Step twice and return the bytes of the states, and of temporaries of the second step."""
    parameter = torch.nn.Parameter(torch.zeros(elements, dtype=dtype, device="cpu"))
    parameter.sum().backward()
    assert parameter.grad is not None, "backward made it"
    optimizer = make_optimizer(name, [parameter], foreach=foreach)
    optimizer.step()
    states = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
    live = LiveStorages([parameter, parameter.grad, *states])
    with live:
        optimizer.step()
    return _StepMemory(sum(state.untyped_storage().nbytes() for state in states), live.peak_bytes)
