"""The state of an optimizer by names of parameters, so that groups, ranks and sharding may change.

[Note: no step] Torch's `get_optimizer_state_dict` calls ``optimizer.step()`` where there is no state yet, with
zeros for gradients. Here that would be a step of the training: gradients are exchanged, steps are counted. And
Adam would save a step count of 1 where it has 0. So the names are put in here, and nothing is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...core.vocabulary.errors import CheckpointError

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def parameter_names(modules: Mapping[str, nn.Module]) -> dict[int, str]:
    """Return the name of every parameter by its identity: that of its module, then its own without wrappers."""
    names: dict[int, str] = {}
    for prefix, module in modules.items():
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        for name, parameter in inner.named_parameters():
            plain = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
            names.setdefault(id(parameter), f"{prefix}/{plain}")
    return names


def read_optimizer(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return an optimizer's state with names instead of numbers."""
    ordered = [_name(parameter, index, names) for index, parameter in enumerate(_parameters(optimizer))]
    state = optimizer.state_dict()
    own = state["state"]
    groups = [
        {**group, "params": [ordered[index] for index in group["params"]]} for group in state["param_groups"]
    ]
    return {
        "state": {ordered[key]: value for key, value in own.items() if isinstance(key, int)},
        "other_state": {key: value for key, value in own.items() if not isinstance(key, int)},
        "groups": groups,
        "rest": {key: value for key, value in state.items() if key not in ("state", "param_groups")},
    }


def write_optimizer(optimizer: Optimizer, names: Mapping[int, str], saved: Mapping[str, Any]) -> None:
    """Load what `read_optimizer` returned. The names were compared before (`different_groups`)."""
    parameters = _parameters(optimizer)
    ordered = [_name(parameter, index, names) for index, parameter in enumerate(parameters)]
    index_of = {name: index for index, name in enumerate(ordered)}
    state = {index_of[name]: value for name, value in saved["state"].items()}
    groups = [
        {**group, "params": [index_of[name] for name in group["params"]]}
        for group in _in_order(optimizer, names, saved)
    ]
    optimizer.load_state_dict(
        {"state": {**state, **saved["other_state"]}, "param_groups": groups, **saved["rest"]}
    )
    # torch casts state to the parameter's type: what an optimizer keeps in another type would lose bits.
    for name, value in saved["state"].items():
        loaded = optimizer.state.get(parameters[index_of[name]], {})
        for key, tensor in value.items():
            now = loaded.get(key)
            if isinstance(tensor, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != tensor.dtype:
                loaded[key] = tensor.to(now.device)


def different_groups(optimizer: Optimizer, names: Mapping[int, str], saved: Mapping[str, Any]) -> list[str]:
    """Return what differs between the parameter groups here and those of a checkpoint; none if they fit."""
    here = [
        [_name(p, index, names) for index, p in _numbered(optimizer) if any(p is each for each in group["params"])]
        for group in optimizer.param_groups
    ]
    there = [group["params"] for group in saved["groups"]]
    if len(here) != len(there):
        return [f"{len(there)} parameter groups in the checkpoint, {len(here)} here"]
    found = []
    for number, (own, other) in enumerate(zip(here, there, strict=True)):
        for name in sorted(set(own) ^ set(other)):
            where = "here" if name in own else "in the checkpoint"
            found.append(f"{name} is in parameter group {number} only {where}")
    return found


def state_reference(parameter: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Return the sharded tensor whose shards a state of `shape` follows; None if it is a plain one."""
    return parameter if isinstance(parameter, DTensor) and tuple(parameter.shape) == shape else None


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _numbered(optimizer: Optimizer) -> list[tuple[int, torch.Tensor]]:
    return list(enumerate(_parameters(optimizer)))


def _in_order(optimizer: Optimizer, names: Mapping[int, str], saved: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the saved groups with their parameters in the order in which they are here."""
    result = []
    numbers = {id(parameter): index for index, parameter in _numbered(optimizer)}
    for group, own in zip(saved["groups"], optimizer.param_groups, strict=True):
        listed = [_name(parameter, numbers[id(parameter)], names) for parameter in own["params"]]
        if set(listed) != set(group["params"]):
            raise CheckpointError("the parameter groups of the optimizer changed while it was loaded")
        result.append({**group, "params": listed})
    return result


def _name(parameter: torch.Tensor, index: int, names: Mapping[int, str]) -> str:
    return names.get(id(parameter), f"parameter {index} of no module")
