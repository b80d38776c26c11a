"""What the front ends share: whole states of what a plan divides, for trainers with files of their own; refusals.

[Note: whole for a moment] A trainer writes a model by many ways: ``save_pretrained``, that of adapters, a class of
its own. So the parameters themselves are gathered and stand in the model while it writes. Names, types and what is
tied are then those of the undivided model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from ..comm.world.world import world
from ..core.job_plan import resolve_plan
from ..core.vocabulary.rules import check
from ..core.vocabulary.text import install_command
from ..parallel.frozen_weight import FrozenWeight
from ..train.loop import accumulate


def check_job(fact: str) -> None:
    """Raise `PlanError` if the plan of the job does not go with `fact`, such as ``trainer``.

    Called by all ranks, before anything is moved or sent.
    """
    check({**vars(resolve_plan(None)), fact: True})


def is_divided(model: nn.Module) -> bool:
    """Return whether this rank has a part of some parameters (ZeRO stage 3), or has them packed."""
    return any(isinstance(each, (DTensor, FrozenWeight)) for each in _sharded_back(model).parameters())


@contextmanager
def whole_parameters(model: nn.Module, *, here: bool = True) -> Iterator[None]:
    """Let `model` have whole parameters, in CPU memory, inside the context. See [Note: whole for a moment].

    To be entered by all ranks, none of which may run the model or load its state inside.

    Args:
        model: one whose parameters are `DTensor`, or packed frozen ones; others stay as they are.
        here: whether this rank has them whole; the others only help to gather them.
    """
    before: list[tuple[Any, str, Any]] = []
    whole: dict[int, tuple[Any, nn.Parameter]] = {}
    for module in _sharded_back(model).modules():
        own: dict[str, Any] = module._parameters
        for name, parameter in own.items():
            if not isinstance(parameter, (DTensor, FrozenWeight)):
                continue
            if id(parameter) not in whole:
                value = parameter.decode() if isinstance(parameter, FrozenWeight) else _gathered(parameter)
                kept = value.cpu() if here else value.new_empty(0)
                whole[id(parameter)] = parameter, nn.Parameter(kept, requires_grad=parameter.requires_grad)
            before.append((own, name, parameter))
    try:
        for parameters, name, parameter in before if here else ():
            parameters[name] = whole[id(parameter)][1]
        yield
    finally:
        for parameters, name, parameter in before:
            parameters[name] = parameter


@contextmanager
def taking_whole_states(model: nn.Module) -> Iterator[None]:
    """Let ``model.load_state_dict`` take this rank's part of a whole state that all ranks give it."""

    def divide(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, parameter in _sharded_back(module).named_parameters(remove_duplicate=False):
            if prefix + name in state:
                state[prefix + name] = _part_of(state[prefix + name], parameter)

    handle = model.register_load_state_dict_pre_hook(divide)
    hooks: Any = model._load_state_dict_pre_hooks
    hooks.move_to_end(handle.id, last=False)  # another one refuses whole states
    try:
        yield
    finally:
        handle.remove()


def whole_optimizer_state(saved: Mapping[str, Any], *, here: bool = True) -> dict[str, Any]:
    """Return what ``optimizer.state_dict()`` gave with whole tensors, in CPU memory; without states if not `here`.

    To be called by all ranks.
    """
    state: dict[Any, Any] = {}
    for index, values in saved["state"].items():
        found = values
        if isinstance(values, Mapping):
            found = {
                key: value.full_tensor().cpu() if isinstance(value, DTensor) else value
                for key, value in values.items()
            }
        if here:
            state[index] = found
    return {**saved, "state": state}


def load_whole_optimizer(optimizer: Optimizer, load: Callable[[Any], Any], saved: Mapping[str, Any]) -> None:
    """Call `load` with this rank's part of what `whole_optimizer_state` returned. To be called by all ranks."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    state = {
        index: {key: _part_of(value, parameters[index]) for key, value in values.items()}
        if isinstance(index, int) and index < len(parameters) and isinstance(values, Mapping)
        else values
        for index, values in saved["state"].items()
    }
    load({**saved, "state": state})


@contextmanager
def replaced(owner: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Let `owner` have `method` for a method of its class inside the context."""
    vars(owner)[name] = method
    try:
        yield
    finally:
        del vars(owner)[name]


def _gathered(value: Any) -> torch.Tensor:
    whole: torch.Tensor = value.detach().full_tensor()
    return whole


def _part_of(value: Any, parameter: torch.Tensor) -> Any:
    is_like = isinstance(value, torch.Tensor) and isinstance(parameter, DTensor) and value.shape == parameter.shape
    if not is_like or isinstance(value, DTensor) or not isinstance(parameter, DTensor):
        return value
    device = parameter.device_mesh.device_type
    # No message: every rank has the whole, and takes its part.
    cut = distribute_tensor(value.to(device), parameter.device_mesh, parameter.placements, src_data_rank=None)
    return cut.detach().clone()


def _sharded_back(model: nn.Module) -> nn.Module:
    """Return `model` without what a pass has gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return model


# The error for a package that a front end needs and that is not installed.


def missing(module: str, extra: str, problem: ImportError) -> ImportError:
    """Return the error for front end `module`, which needs what the extra `extra` of this package installs."""
    return ImportError(
        f"{module} needs {extra}, which cannot be imported ({problem}); install it with: {install_command(extra)}",
        name=problem.name,
    )


# Passes that a trainer accumulates: `fd.accumulate`, for those who enter it once for each of several models.


@contextmanager
def holding_passes() -> Iterator[None]:
    """Keep the gradients of backward passes inside on this rank; inside another such context nothing changes."""
    if world().session.holds_passes:
        yield
        return
    with accumulate():
        yield
