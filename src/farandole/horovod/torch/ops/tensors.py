"""Which tensors an operation takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....comm.named_ops.data.reductions import refuse_reduction
from ....comm.named_ops.operations.signature import DTYPE_NAMES
from ...common.exceptions import HorovodUnsupportedError
from ...common.reductions import reduction_of


def check_movable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that can be sent, without its history; raise ValueError for one that cannot."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"expected a tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.dtype not in DTYPE_NAMES:
        raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    if not tensor.is_contiguous():
        raise ValueError("Tensor is required to be contiguous.")
    return tensor.detach()


def check_reducible(tensor: torch.Tensor, op: int) -> torch.Tensor:
    """Return a tensor that can be reduced with `op`, without its history; raise ValueError else."""
    sent = check_movable(tensor)
    reason = refuse_reduction(tensor.dtype, reduction_of(op))
    if reason:
        raise ValueError(f"Tensor type {tensor.type()} is not supported. ({reduction_of(op)}: {reason})")
    return sent


def check_list(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the members of a group; raise ValueError for none."""
    found = list(tensors)
    if not found:
        raise ValueError("a grouped operation needs at least one tensor")
    if len({tensor.device for tensor in found}) > 1:
        raise HorovodUnsupportedError(
            f"Tensors in list must be on same device. (got {sorted({str(tensor.device) for tensor in found})})"
        )
    return found
