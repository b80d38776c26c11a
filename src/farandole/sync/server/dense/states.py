"""States of an optimizer, cut as its parameters are: what has a parameter's shape is cut, one number is copied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ....core.vocabulary.errors import ConfigError
from .layout import ShardPiece, part_of, put_part

Written = dict[str, list[Any]]
"""JSON, by name of a state: ["cut", place of the tensor], ["tensor", place] or ["number", value]."""


def write_state(
    state: Mapping[str, Any], shape: torch.Size, piece: ShardPiece, tensors: list[torch.Tensor]
) -> Written:
    """Return the part of a parameter's state that belongs to `piece`; its tensors are added to `tensors`.

    Raises `ConfigError` for a state of another shape.
    """
    written: Written = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.shape != shape:
            written[name] = ["tensor", len(tensors)]
            tensors.append(value.detach().cpu().clone())
        elif isinstance(value, torch.Tensor) and value.shape == shape:
            written[name] = ["cut", len(tensors)]
            tensors.append(part_of(value, piece))
        elif value is None or isinstance(value, (bool, int, float)):
            written[name] = ["number", value]
        else:
            shown = f"the shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise ConfigError(
                f"a server cannot hold the state {name!r} of an optimizer: it is of {shown}, and its parameter of "
                f"{tuple(shape)}"
            )
    return written


def read_state(written: Written, tensors: list[torch.Tensor]) -> dict[str, Any]:
    """Return the state of a piece, whose parameter is the piece."""
    return {
        name: tensors[value].clone() if kind in ("cut", "tensor") else value
        for name, (kind, value) in written.items()
    }


def join_state(
    state: dict[str, Any],
    parameter: torch.Tensor,
    piece: ShardPiece,
    written: Written,
    tensors: list[torch.Tensor],
) -> None:
    """Put what a server has of a piece into the `state` of the whole parameter."""
    for name, (kind, value) in written.items():
        if kind == "cut":
            if name not in state:
                state[name] = torch.zeros_like(parameter, dtype=tensors[value].dtype)
            put_part(state[name], piece, tensors[value])
        else:
            state[name] = tensors[value].clone() if kind == "tensor" else value
