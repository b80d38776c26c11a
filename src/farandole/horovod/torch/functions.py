"""Broadcasts from one rank to all: parameters, the state of an optimizer, any object.

Objects travel as pickles (cloudpickle when it is installed), so ranks run code of each other: they are one
job and trust each other as they trust the program they run.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..common.basics import basics
from ..common.process_sets import ProcessSet, global_process_set
from .ops.allgather import allgather
from .ops.broadcast import broadcast, broadcast_async_  # noqa: F401 - scripts import names of Horovod from here
from .ops.handles import synchronize, wait_for_all

rank, size = basics.rank, basics.size  # scripts import names of Horovod from here

Named = Sequence[tuple[str, torch.Tensor] | torch.Tensor]


def broadcast_parameters(params: Mapping[str, torch.Tensor] | Named, root_rank: int) -> None:
    """Overwrite tensors with those of rank `root_rank`.

    Args:
        params: a `state_dict`, a list of (name, tensor) or a list of tensors, the same on all ranks.
        root_rank: the rank whose tensors are sent.

    Raises:
        ValueError: `params` has another type.
    """
    if isinstance(params, Mapping):
        pairs: list[tuple[str | None, Any]] = sorted(params.items())
    elif isinstance(params, list):
        pairs = [each if isinstance(each, tuple) else (None, each) for each in params]
    else:
        raise ValueError(
            f"invalid params of type: {type(params)} (expected a dict, a list of (name, tensor) or of tensors)"
        )
    for name, value in pairs:
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"broadcast_parameters: {name!r} is a {type(value).__name__}, expected a tensor")
    _broadcast_in_place(pairs, root_rank)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give every rank the optimizer state and options of rank `root_rank`.

    State that is missing on this rank is created without a step, so that counters and averages continue exactly as
    at the root.

    Args:
        optimizer: an optimizer with the same parameter groups on all ranks.
        root_rank: the rank whose state is sent.
        model: ignored; Horovod has this argument.

    Raises:
        ValueError: the optimizer is LBFGS, or its groups or numbers of parameters differ from the root's.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    here = optimizer.state_dict()
    plan, tensors = _take_apart(here)
    wanted = broadcast_object(plan, root_rank, name="optimizer_state")
    if basics.rank() != root_rank:
        tensors = [each.empty() for each in _find_places(wanted)]
    _broadcast_in_place([(f"optimizer_state.{i}", each) for i, each in enumerate(tensors)], root_rank)
    if basics.rank() != root_rank:
        optimizer.load_state_dict(_put_together(wanted, iter(tensors)))


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the object of rank `root_rank`. It is pickled.

    Args:
        obj: any object that can be pickled; only the root's is used.
        root_rank: the rank whose object is sent.
        name: the same on all ranks; by default a counter makes one.
        process_set: the ranks that take part.
    """
    payload = _dumps(obj) if basics.rank() == root_rank else b""
    names = (None, None) if name is None else (f"{name}.sz", f"{name}.t")
    length = torch.tensor([len(payload)])
    synchronize(broadcast_async_(length, root_rank, names[0], process_set))
    root = basics.rank() == root_rank
    content = _as_tensor(payload) if root else torch.empty(int(length), dtype=torch.uint8)
    synchronize(broadcast_async_(content, root_rank, names[1], process_set))
    return obj if root else _loads(content)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return the objects of all ranks, in rank order. They are pickled.

    Args:
        obj: any object that can be pickled.
        name: the same on all ranks; by default a counter makes one.
    """
    payload = _dumps(obj)
    names = (None, None) if name is None else (f"{name}.sz", f"{name}.t")
    lengths = allgather(torch.tensor([len(payload)]), names[0]).tolist()
    parts = allgather(_as_tensor(payload), names[1]).split(lengths)
    mine = basics.rank()
    return [obj if place == mine else _loads(part) for place, part in enumerate(parts)]


def _broadcast_in_place(pairs: Sequence[tuple[str | None, torch.Tensor]], root_rank: int) -> None:
    """Broadcast all at once; a tensor that is not contiguous (channels last) travels as a copy."""
    waiting = []
    for name, tensor in pairs:
        travels = tensor.detach().contiguous()
        waiting.append((tensor.detach(), travels, broadcast_async_(travels, root_rank, name)))
    wait_for_all(partial(synchronize, handle) for _, _, handle in waiting)
    for tensor, travels, _ in waiting:
        if not tensor.is_contiguous():
            tensor.copy_(travels)


@dataclass(frozen=True)
class _TensorSpec:
    """Where a tensor was in a state, and what it takes to make one like it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device_type: str

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device_type)


def _take_apart(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """Return `value` with a `_TensorSpec` for each tensor, and the tensors in that order."""
    tensors: list[torch.Tensor] = []

    def walk(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            dense = part if _has_no_holes(part) else part.contiguous()
            tensors.append(dense)
            return _TensorSpec(tuple(dense.shape), dense.stride(), dense.dtype, dense.device.type)
        return _map(part, walk)

    return walk(value), tensors


def _find_places(value: Any) -> list[_TensorSpec]:
    places: list[_TensorSpec] = []

    def walk(part: Any) -> Any:
        if isinstance(part, _TensorSpec):
            places.append(part)
            return part
        return _map(part, walk)

    walk(value)
    return places


def _put_together(value: Any, tensors: Any) -> Any:
    def walk(part: Any) -> Any:
        return next(tensors) if isinstance(part, _TensorSpec) else _map(part, walk)

    return walk(value)


def _map(part: Any, walk: Any) -> Any:
    """Return a container with `walk` applied to its parts, in their order; anything else as it is."""
    if isinstance(part, dict):
        return {key: walk(each) for key, each in part.items()}
    if type(part) in (list, tuple):
        return type(part)(walk(each) for each in part)
    return part


def _has_no_holes(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or torch.empty_like(tensor, memory_format=torch.preserve_format).stride() == (
        tensor.stride()
    )


def _dumps(obj: Any) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    data: bytes = cloudpickle.dumps(obj)
    return data


def _loads(content: torch.Tensor) -> Any:
    return pickle.load(io.BytesIO(content.numpy().tobytes()))


def _as_tensor(payload: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)
