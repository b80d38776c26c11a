"""The state of an optimizer by names of parameters, so that groups, ranks and sharding may change.

[Note: no step] Torch's `get_optimizer_state_dict` calls ``optimizer.step()`` where there is no state yet, with
zeros for gradients. Here that would be a step of the training: gradients are exchanged, steps are counted. And
Adam would save a step count of 1 where it has 0. So the names are put in here, and nothing is called.

[Note: plans as JSON] Every rank makes its own plan (`DefaultSavePlanner`). A replicated training has equal plans
on all ranks, so digests are compared and nothing more is said; otherwise all plans go through the store as JSON,
never pickled. Every rank then divides the boxes in the same way, and DCP's planner checks that they cover each
tensor once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...checkpoint.shard_file import tensor_bytes
from ...core.vocabulary.errors import CheckpointError
from ...parallel.split import Split, boxes_here, split_of
from .agreement import named
from .values import entries

# Who writes what: DCP's planners say which boxes there are, and replicas divide them by bytes.

PIECE_BYTES = 32 << 20
"""Larger tensors are cut along their first dimension: to be divided among ranks, and hashed side by side."""

Item = tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""A box in a plan: name of the tensor, its type, its shape, and offsets and shape of the box."""


def local_items(tensors: Mapping[str, torch.Tensor], splits: Mapping[str, Split] | None = None) -> list[Item]:
    """Return the boxes that this rank could write, of at most `PIECE_BYTES` if the first dimension allows it.

    `splits` tells which part of a whole one a tensor is: boxes are those of the whole.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    whole = {name: tensor for name, tensor in tensors.items() if name not in (splits or {})}
    planner.set_up_planner(whole, is_coordinator=False)
    items: list[Item] = []
    for each in planner.create_local_plan().items:
        data = each.tensor_data
        assert data is not None, f"{each.index.fqn} is a tensor"
        dtype = str(data.properties.dtype).removeprefix("torch.")
        offsets, shape = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
        if not all(shape) and tuple(data.size) != shape:
            continue  # a shard without elements: its rank has none of the tensor
        items += [(each.index.fqn, dtype, tuple(data.size), *box) for box in _cut(dtype, offsets, shape)]
    for name, split in (splits or {}).items():
        dtype = str(tensors[name].dtype).removeprefix("torch.")
        for part in boxes_here(tensors[name], split):
            items += [(name, dtype, split.shape, *box) for box in _cut(dtype, part.offsets, part.shape)]
    return items


def divide(plans: Sequence[Sequence[Item]]) -> list[list[Item]]:
    """Return which of its boxes each rank writes: each box once, the bytes as even as can be.

    Raises `ValueError` when the boxes do not cover each tensor once.
    """
    owners: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    items: dict[tuple[str, tuple[int, ...]], Item] = {}
    for rank, plan in enumerate(plans):
        for item in plan:
            owners.setdefault((item[0], item[3]), []).append(rank)
            items[item[0], item[3]] = item
    loads = [0] * len(plans)
    divided: list[list[Item]] = [[] for _ in plans]
    sizes = {key: tensor_bytes(item[1], item[4]) for key, item in items.items()}
    for key in sorted(items, key=lambda key: (-sizes[key], key)):
        rank = min(owners[key], key=lambda each: (loads[each], each))
        loads[rank] += sizes[key]
        divided[rank].append(items[key])
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({}, is_coordinator=True)
    planner.create_global_plan([SavePlan([_write_item(item) for item in plan]) for plan in divided])
    return [sorted(plan) for plan in divided]


def plan_from_json(value: Any) -> list[Item]:
    """Return a plan that went through the store."""
    return [
        (name, dtype, tuple(size), tuple(offsets), tuple(shape)) for name, dtype, size, offsets, shape in value
    ]


def _write_item(item: Item) -> WriteItem:
    name, dtype, size, offsets, shape = item
    return WriteItem(
        index=MetadataIndex(name, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape)),
            properties=dataclasses.replace(TensorProperties(torch.float32), dtype=getattr(torch, dtype)),
            size=torch.Size(size),
        ),
    )


def _cut(
    dtype: str, offsets: tuple[int, ...], shape: tuple[int, ...]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    nbytes = tensor_bytes(dtype, shape)
    if nbytes <= PIECE_BYTES or shape[0] < 2:
        return [(offsets, shape)]
    count = min(shape[0], -(-nbytes // PIECE_BYTES))
    rows = -(-shape[0] // count)
    return [
        ((offsets[0] + at, *offsets[1:]), (min(rows, shape[0] - at), *shape[1:]))
        for at in range(0, shape[0], rows)
    ]


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
