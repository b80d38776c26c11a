"""Allgather, of one tensor and of a group: every rank's rows, in the order of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....comm.named_ops.operations import Request
from ...common.operations import names_of_group, operation_names, set_number
from ...common.process_sets import ProcessSet, global_process_set
from ...common.reductions import Average
from .allreduce import allreduce
from .grouped_allreduce import grouped_allreduce
from .handles import check_list, check_movable, handles, synchronize


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an allgather and return its handle for `synchronize`. See `allgather`."""
    number = set_number(process_set, "Allgather")
    sent = check_movable(tensor)
    request = Request(operation_names.name("allgather", name, process_set), "allgather", sent, process_set=number)
    return handles.submit([request], lambda results: results[0])


class HorovodAllgather(torch.autograd.Function):
    """An allgather that gradients pass through: the *mean* of all ranks' gradients of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> torch.Tensor:
        """Return all ranks' rows."""
        ctx.rows, ctx.process_set = tensor.shape[:1], process_set
        gathered: torch.Tensor = synchronize(allgather_async(tensor, name, process_set))
        return gathered

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradient of this rank's rows."""
        mine = allreduce(grad_output.contiguous(), op=Average, process_set=ctx.process_set)
        return _my_rows([mine], [ctx.rows[0]], ctx.process_set)[0], None, None


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the rows (first dimension) of all ranks' `tensor`, concatenated in rank order.

    The gradient of the result is averaged over the ranks, as in Horovod, not summed.

    Args:
        tensor: shape (rows, ...); the number of rows may differ between ranks, the other dimensions may not.
        name: the same on all ranks; by default a counter makes one.
        process_set: the ranks that take part.

    Returns:
        A new tensor of shape (rows of all ranks, ...) and the same dtype.
    """
    gathered: torch.Tensor = HorovodAllgather.apply(tensor, name, process_set)
    return gathered


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an allgather of all `tensors` and return the handle of the group. See `allgather`.

    The operations of a group run completely or not at all.
    """
    found = check_list(tensors)
    number = set_number(process_set, "Allgather")
    names = names_of_group("grouped_allgather", name, process_set, len(found))
    requests = [
        Request(each, "allgather", check_movable(tensor), process_set=number)
        for each, tensor in zip(names, found, strict=True)
    ]
    return handles.submit(requests, list)


class HorovodGroupedAllgather(torch.autograd.Function):
    """A grouped allgather that gradients pass through."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return all ranks' rows of each tensor."""
        ctx.rows, ctx.process_set = [tensor.shape[:1] for tensor in tensors], process_set
        return tuple(synchronize(grouped_allgather_async(tensors, name, process_set)))

    @staticmethod
    def backward(ctx: Any, *grad_output: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients of this rank's rows."""
        means = grouped_allreduce(
            [grad.contiguous() for grad in grad_output], op=Average, process_set=ctx.process_set
        )
        return None, None, *_my_rows(means, [rows[0] for rows in ctx.rows], ctx.process_set)


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Return the rows of all ranks' tensors, one result for each of `tensors`. See `allgather`."""
    return list(HorovodGroupedAllgather.apply(name, process_set, *check_list(tensors)))


def _my_rows(gathered: Sequence[torch.Tensor], rows: Sequence[int], process_set: ProcessSet) -> list[torch.Tensor]:
    """Return what belongs to this rank of each gathered tensor, of which it gave `rows`."""
    everybody = synchronize(allgather_async(torch.tensor([list(rows)]), process_set=process_set))
    before = everybody[: process_set.rank()].sum(0).tolist()
    return [each.narrow(0, begin, count) for each, begin, count in zip(gathered, before, rows, strict=True)]
