"""Alltoall: every rank sends some of its rows to each, and gets what they send to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....comm.named_ops.operations import Request
from ...common.operations import operation_names, set_number
from ...common.process_sets import ProcessSet, global_process_set
from .handles import check_movable, handles, synchronize


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an alltoall and return its handle. See `alltoall`.

    The result of `synchronize` is always ``(output, received_splits)``.
    """
    number = set_number(process_set, "Alltoall")
    sent = check_movable(tensor)
    rows = None if splits is None else tuple(_as_tensor(splits).tolist())
    request = Request(
        operation_names.name("alltoall", name, process_set), "alltoall", sent, splits=rows, process_set=number
    )
    return handles.submit([request], lambda results: tuple(results[0]))


class HorovodAlltoall(torch.autograd.Function):
    """An alltoall that gradients pass through: they go back the way their rows came."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        splits: torch.Tensor | Sequence[int] | None,
        name: str | None,
        process_set: ProcessSet,
    ) -> Any:
        """Return the rows received and, when `splits` were given, how many came from each rank."""
        output, received_splits = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.received_splits, ctx.process_set, ctx.rows = received_splits, process_set, tensor.shape[:1]
        if splits is None:
            return output
        ctx.mark_non_differentiable(received_splits)
        return output, received_splits

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor, *dead_gradients: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients of the rows sent."""
        handle = alltoall_async(grad_output.contiguous(), ctx.received_splits, process_set=ctx.process_set)
        grad = synchronize(handle)[0]
        unsent = ctx.rows[0] - grad.shape[0]
        if unsent:  # the last rows may go nowhere, and nothing depends on them
            grad = torch.cat([grad, grad.new_zeros(unsent, *grad.shape[1:])])
        return grad, None, None, None


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows of `tensor` to each rank and return the received rows, in rank order.

    Args:
        tensor: shape (rows, ...); rows are sent in rank order.
        splits: number of rows for each rank (an int32 tensor or a list); by default the same for all.
        name: the same on all ranks; by default a counter makes one.
        process_set: the ranks that take part.

    Returns:
        Without `splits` the received rows. With `splits` the pair ``(output, received_splits)``.

    Raises:
        ValueError: `splits` do not fit the rows or the number of ranks.
    """
    return HorovodAlltoall.apply(tensor, splits, name, process_set)


def _as_tensor(splits: torch.Tensor | Sequence[int]) -> torch.Tensor:
    if not isinstance(splits, torch.Tensor):
        splits = torch.tensor(list(splits), dtype=torch.int32)
    if splits.dtype != torch.int32:
        raise ValueError(
            f"alltoall expects splits to contain 32-bit integer elements. (got {splits.dtype}; use splits.int())"
        )
    if splits.dim() != 1:
        raise ValueError(f"alltoall expects a 1D splits tensor (got shape {tuple(splits.shape)})")
    return splits
