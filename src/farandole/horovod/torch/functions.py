"""Broadcasts from one rank to all: parameters, the state of an optimizer, any object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..common import objects
from ..common.basics import basics
from ..common.objects import broadcast_object as broadcast_object  # noqa: PLC0414 - of this module, too
from ..common.process_sets import ProcessSet  # noqa: F401 - scripts import names of Horovod from here
from .ops.allreduce import broadcast, broadcast_async_  # noqa: F401 - the same
from .ops.gather_scatter import allgather  # noqa: F401 - the same
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


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return the objects of all ranks, in rank order. They are pickled.

    Args:
        obj: any object that can be pickled.
        name: the same on all ranks; by default a counter makes one.
    """
    return objects.allgather_object(obj, name)


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
