"""The state of an optimizer by names of parameters, so that groups, ranks and sharding may change.

[Note: no step] Torch's `get_optimizer_state_dict` calls ``optimizer.step()`` where there is no state yet, with
zeros for gradients. Here that would be a step of the training: gradients are exchanged, steps are counted. And
Adam would save a step count of 1 where it has 0. So the names are put in here, and nothing is called.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...core.vocabulary.errors import CheckpointError
from ...parallel.split import split_of
from .agreement import named
from .values import entries

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def parameter_names(modules: Mapping[str, nn.Module]) -> dict[int, str]:
    """Return the name of every parameter by its identity: that of its module, then its own without wrappers."""
    names: dict[int, str] = {}
    for prefix, module in modules.items():
        for name, parameter in plain_parameters(module):
            names.setdefault(id(parameter), f"{prefix}/{name}")
    return names


def plain_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters by all their names, as the state dict has them: without those of wrappers."""
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    for part in inner.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # between forward and backward a module has its gathered parameters
    return [
        (".".join(part for part in name.split(".") if part not in _WRAPPERS), parameter)
        for name, parameter in inner.named_parameters(remove_duplicate=False)
    ]


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


LIKE_PARAMETERS = frozenset(
    (
        "acc_delta",
        "exp_avg",
        "exp_avg_sq",
        "exp_inf",
        "grad_avg",
        "max_exp_avg_sq",
        "momentum_buffer",
        "square_avg",
    )
)
"""States of torch's own optimizers that have the shape of their parameter."""


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
            if not isinstance(tensor, torch.Tensor) or not isinstance(now, torch.Tensor):
                continue
            if now.dtype != tensor.dtype and now.shape == tensor.shape:  # not of rows, which kept their type
                loaded[key] = tensor.to(now.device)


def load_optimizer(
    name: str, optimizer: Optimizer, names: Mapping[int, str], saved: Mapping[str, Any], *, tries: bool = False
) -> None:
    """Load a state as `write_optimizer` does. Raises `CheckpointError` with the optimizer's `name`.

    With `tries` a copy loads it, and the optimizer is as it was. One with ways of its own to load or copy a state
    is not tried: its copy might share what loading changes, or load more than this rank's part.
    """
    kind = type(optimizer)
    has_hooks = optimizer._optimizer_load_state_dict_pre_hooks or optimizer._optimizer_load_state_dict_post_hooks
    if not tries:
        with named(name, "other parts of the training were loaded: start anew"):
            write_optimizer(optimizer, names, saved)
    elif not has_hooks and (kind.load_state_dict, kind.__getstate__) == (
        Optimizer.load_state_dict, Optimizer.__getstate__
    ):  # fmt: skip
        with named(name, "nothing was loaded"):
            write_optimizer(copy(optimizer), names, saved)


def require_like(
    parameter: torch.Tensor, optimizer: Optimizer, key: str, name: str, shape: tuple[int, ...]
) -> None:
    """Raise `CheckpointError` for a state of torch's own optimizers that is to have the shape of its parameter."""
    split = split_of(parameter)
    whole = tuple(parameter.shape) if split is None else split.shape
    is_torchs = type(optimizer).__module__.startswith("torch.optim.")
    if is_torchs and key in LIKE_PARAMETERS and shape != whole:
        raise CheckpointError(
            f"{key} of {name} has the shape {shape} in the checkpoint, and the parameter {whole} here",
            is_input=True,
            remedy="nothing was loaded: the checkpoint is of another training, or was changed",
        )


def merge_optimizers(name: str, saved: Sequence[Any], order: Sequence[str]) -> dict[str, Any]:
    """Return one optimizer's state as JSON, of ranks that have the states of other parameters each.

    Args:
        name: of the optimizer.
        saved: what `read_optimizer` returned on each rank, encoded.
        order: names of all parameters, in the order of the model.

    Raises:
        CheckpointError: what the ranks have in common differs.
    """
    states: dict[str, Any] = {}
    for each in saved:
        for parameter, values in entries(each["state"]):
            if states.setdefault(parameter, values) != values:
                raise CheckpointError(f"the ranks have different states of {parameter} in {name}")
    rest = [
        {**each, "state": {}, "groups": [{**group, "params": []} for group in each["groups"]]} for each in saved
    ]
    if any(each != rest[0] for each in rest):
        raise CheckpointError(f"the ranks have different states of {name}: values of parameter groups differ")
    ranks = {parameter: place for place, parameter in enumerate(order)}
    groups = []
    for number, group in enumerate(rest[0]["groups"]):
        listed = {parameter for each in saved for parameter in each["groups"][number]["params"]}
        groups.append({**group, "params": sorted(listed, key=lambda each: (ranks.get(each, len(ranks)), each))})
    known = [parameter for group in groups for parameter in group["params"] if parameter in states]
    return {**rest[0], "state": {parameter: states[parameter] for parameter in known}, "groups": groups}


def without_parameters(saved: Any, absent: Collection[str]) -> Any:
    """Return the encoded state of an optimizer without what belongs to the parameters `absent`."""
    if not absent:
        return saved
    return {
        **saved,
        "state": {name: values for name, values in entries(saved["state"]) if name not in absent},
        "groups": [
            {**group, "params": [each for each in group["params"] if each not in absent]}
            for group in saved["groups"]
        ],
    }


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
    """Return the tensor whose shards or part a state of `shape` follows; None if it is a whole one."""
    split = split_of(parameter)
    if split is not None:
        return parameter if split.shape == shape else None
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
