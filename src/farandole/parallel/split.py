"""Parameters that are split over ranks: which pieces of the whole a rank has.

A split parameter is a plain `nn.Parameter` of the local shape. Checkpoints, norms and comparisons ask here what it
is part of.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.weak import WeakIdKeyDictionary

from ..core.vocabulary.errors import ConfigError


@dataclass(frozen=True)
class Split:
    """What a rank has of a parameter: its `pieces` along `dim`, one after the other."""

    shape: tuple[int, ...]
    """The shape of the whole parameter."""
    dim: int
    pieces: tuple[tuple[int, int], ...]
    """Start and length of each, along `dim`, in elements."""
    degree: str
    """The degree of the mesh whose ranks have the other pieces: "tensor" or "expert"."""

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of `whole`, in memory of its own."""
        parts = [whole.narrow(self.dim, start, length) for start, length in self.pieces]
        return torch.cat(parts, self.dim).contiguous() if len(parts) > 1 else parts[0].clone().contiguous()


@dataclass(frozen=True, slots=True)
class PartBox:
    """A box of a whole tensor that this rank has, one number a dimension."""

    offsets: tuple[int, ...]
    """In the whole tensor."""
    shape: tuple[int, ...]
    begin: tuple[int, ...]
    """In the local tensor: in the local shard, if that part is a DTensor."""


def boxes_here(tensor: torch.Tensor, split: Split | None) -> list[PartBox]:
    """Return the boxes of the whole tensor that this rank has: `tensor` is the part `split` of it.

    If it is a DTensor, a part divided once more, these are the boxes of the local shard. None of them is empty.
    """
    shape, first = tuple(tensor.shape), (0,) * tensor.dim()
    if isinstance(tensor, DTensor):
        found = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        shape, first = tuple(found[0]), tuple(found[1])
    if not all(shape):
        return []
    if split is None:
        return [PartBox(first, shape, (0,) * len(shape))]
    boxes, at, dim = [], 0, split.dim
    for start, length in split.pieces:
        low, high = max(at, first[dim]), min(at + length, first[dim] + shape[dim])
        if low < high:
            boxes.append(
                PartBox(
                    (*first[:dim], start + low - at, *first[dim + 1 :]),
                    (*shape[:dim], high - low, *shape[dim + 1 :]),
                    tuple(low - first[dim] if each == dim else 0 for each in range(len(shape))),
                )
            )
        at += length
    return boxes


def is_of_expert(parameter: torch.Tensor) -> bool:
    """Return whether it is one of experts that are divided: ranks with other samples may have another part."""
    split = split_of(parameter)
    return split is not None and split.degree == "expert"


_splits: WeakIdKeyDictionary = WeakIdKeyDictionary()
_copies: WeakIdKeyDictionary = WeakIdKeyDictionary()


def mark_split(parameter: torch.Tensor, split: Split) -> None:
    """Let it be known that `parameter` is only a part, `split`, of a whole one."""
    expected = split.take(torch.empty(split.shape, dtype=parameter.dtype, device="meta")).shape
    assert parameter.shape == expected, f"{tuple(parameter.shape)} is not {split}"
    _splits[parameter] = split


def split_of(parameter: torch.Tensor) -> Split | None:
    """Return what part of a whole `parameter` is; None if it is whole."""
    found: Split | None = _splits.get(parameter)
    return found


def carry_marks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Let `target`, which stands for the parameter `source` from now on, be the same part of a whole one."""
    if source in _splits:
        _splits[target] = _splits[source]
    if source in _copies:
        _copies[target] = True


def split_in_place(parameter: torch.nn.Parameter, split: Split, optimizers: list[torch.optim.Optimizer]) -> None:
    """Shrink `parameter` to this rank's part, and with it the states of it that `optimizers` have already."""
    whole = parameter.shape
    assert tuple(whole) == split.shape, f"{tuple(whole)} is to be split as {split}"
    if parameter.grad is not None:
        raise ConfigError(
            f"a parameter of shape {tuple(whole)} has a gradient before it is split",
            remedy="call distribute before the first backward(), or optimizer.zero_grad() before it",
        )
    parameter.data = split.take(parameter.data)
    mark_split(parameter, split)
    for optimizer in optimizers:
        state = optimizer.state.get(parameter, {})
        for name, value in list(state.items()):
            if isinstance(value, torch.Tensor) and value.shape == whole:
                state[name] = split.take(value)


def mark_copy(parameter: torch.Tensor) -> None:
    """Let it be known that another rank has the parameter too, and counts it: one that is tied over stages."""
    _copies[parameter] = True


def is_copy(parameter: torch.Tensor) -> bool:
    """Return whether norms and checkpoints count this parameter on another rank."""
    return parameter in _copies
