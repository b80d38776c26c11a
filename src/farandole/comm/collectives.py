"""Collectives of the backend: the sum of a bucket, broadcast."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..core.vocabulary.errors import ConfigError
from .messages import bytes_of
from .world.comm_errors import translated
from .world.store_sync import all_gather_json
from .world.world import World

# The backend's all-reduce: begun and not waited for, or told to the current stream of a device.


def start_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to sum `tensor` over the group, in place; the tensor must not be touched until `wait`."""
    work: dist.Work | None = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None, "an asynchronous collective returns its work"
    return work


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum `tensor` over the group, in place; on a device the current stream does, and the host does not wait."""
    dist.all_reduce(tensor, group=group)


# Making all ranks hold what rank 0 holds: tensors, and the state of an optimizer.
#
# The shape of a state travels as JSON through the store (no pickle), its tensors as few broadcasts.

CHUNK_BYTES = 32 * 2**20


@torch.no_grad()
def broadcast_tensors(world: World, tensors: Sequence[torch.Tensor]) -> None:
    """Overwrite `tensors` with rank 0's. Shapes and dtypes must be the same on all ranks."""
    if world.size == 1:
        return
    for chunk in _chunks(tensors):
        # As bytes: backends know fewer types than torch (no 16-bit integers, no float8).
        flat = torch.cat([bytes_of(tensor) for tensor in chunk])
        with translated(world, "broadcast"):
            dist.broadcast(flat, group_src=0, group=world.group)
        if world.rank != 0:
            offset = 0
            for tensor in chunk:
                received = flat[offset : offset + tensor.nbytes]
                tensor.copy_(received.view(tensor.dtype).view(tensor.shape))
                offset += tensor.nbytes


def broadcast_optimizer(world: World, optimizer: torch.optim.Optimizer) -> None:
    """Give every rank rank 0's optimizer state and hyper-parameters.

    Raises `ConfigError`, on every rank, when rank 0's state holds something other than tensors,
    numbers, texts, None, lists, tuples and dicts of them.
    """
    if world.size == 1:
        return
    tensors: list[torch.Tensor] = []
    described: Any
    try:
        described = {"state": _encode(optimizer.state_dict(), tensors, "state_dict")}
    except ConfigError as problem:
        described = {"problem": problem.message}
    leader = all_gather_json(world, "optimizer state", described if world.rank == 0 else None)[0]
    if "problem" in leader:
        remedy = "keep only tensors and plain values in the optimizer's state"
        raise ConfigError(leader["problem"], remedy=remedy)
    # Through JSON and back, so that what was compared is what would have arrived.
    if json.loads(json.dumps(described)) == leader:
        broadcast_tensors(world, tensors)  # into the optimizer's own tensors
        return
    state = _decode(leader["state"])
    _to_devices_of(optimizer, state)
    tensors.clear()
    _encode(state, tensors, "state_dict")
    broadcast_tensors(world, tensors)
    optimizer.load_state_dict(state)


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for group in by_kind.values():
        chunk: list[torch.Tensor] = []
        nbytes = 0
        for tensor in group:
            if chunk and nbytes > CHUNK_BYTES:
                yield chunk
                chunk, nbytes = [], 0
            chunk.append(tensor)
            nbytes += tensor.numel() * tensor.element_size()
        yield chunk


def _encode(value: Any, tensors: list[torch.Tensor], where: str) -> Any:
    """Return `value` as JSON; its tensors are appended to `tensors` and leave their shape and dtype."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, dict):
        pairs = [[key, _encode(inner, tensors, f"{where}[{key!r}]")] for key, inner in value.items()]
        if all(isinstance(key, (str, int)) for key in value):
            return {"dict": pairs}
    elif isinstance(value, (list, tuple)):
        items = [_encode(inner, tensors, f"{where}[{i}]") for i, inner in enumerate(value)]
        return {type(value).__name__: items} if type(value) in (list, tuple) else {"list": items}
    elif value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    raise ConfigError(f"optimizer {where} is a {type(value).__name__}, which cannot be sent to other ranks")


def _decode(described: Any) -> Any:
    """Return what `_encode` described, with tensors of unset contents."""
    if "tensor" in described:
        return torch.empty(described["tensor"], dtype=getattr(torch, described["dtype"]))
    if "dict" in described:
        return {key: _decode(inner) for key, inner in described["dict"]}
    if "list" in described:
        return [_decode(inner) for inner in described["list"]]
    if "tuple" in described:
        return tuple(_decode(inner) for inner in described["tuple"])
    return described["value"]


def _to_devices_of(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Move decoded state tensors to their parameters' devices (a step count stays where it is)."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, entries in state["state"].items():
        for name, value in entries.items():
            if isinstance(value, torch.Tensor) and name != "step":
                entries[name] = value.to(parameters[index].device)
