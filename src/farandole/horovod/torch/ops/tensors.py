"""Which tensors an operation takes, and the reductions by Horovod's numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....comm.named_ops.data.reductions import refuse_reduction
from ....comm.named_ops.operations.request import Reduction
from ....comm.named_ops.operations.signature import DTYPE_NAMES
from ...common.exceptions import HorovodUnsupportedError
from ...common.util import get_average_backwards_compatibility_fun

Average = 0
Sum = 1
Adasum = 2
Min = 3
Max = 4
Product = 5

REDUCTIONS: dict[int, Reduction] = {
    Average: "average",
    Sum: "sum",
    Adasum: "adasum",
    Min: "min",
    Max: "max",
    Product: "product",
}


class _Reductions:
    Average = Average
    Sum = Sum


handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(_Reductions)


def reduction_of(op: int) -> Reduction:
    """Return the engine's word for a reduction; raise ValueError for what is none."""
    if op not in REDUCTIONS:
        raise ValueError(f"op={op!r}: expected Average, Sum, Adasum, Min, Max or Product")
    return REDUCTIONS[op]


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


def check_sum_or_average(op: int) -> None:
    """Refuse the other reductions, for a reducescatter."""
    if op not in (Average, Sum):
        raise HorovodUnsupportedError(
            f"Reducescatter currently only supports AVERAGE and SUM. ({reduction_of(op)} was asked for)"
        )


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
