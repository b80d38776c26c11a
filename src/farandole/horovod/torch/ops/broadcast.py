"""Broadcast: every rank gets the root's tensor. The root is a rank of the job, also inside a process set."""

from __future__ import annotations

from typing import Any

import torch

from ....comm.named_ops.operations import Request
from ...common.basics import basics
from ...common.operations import operation_names, set_number
from ...common.process_sets import ProcessSet, global_process_set
from ...common.reductions import Average
from .allreduce import allreduce
from .handles import check_movable, handles, synchronize


def _begin(given: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> int:
    number = set_number(process_set, "Broadcast")
    request = Request(
        operation_names.name("broadcast", name, process_set),
        "broadcast",
        check_movable(given),
        in_place=True,
        root=root_rank,
        process_set=number,
    )
    return handles.submit([request], lambda results: given)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a broadcast into a new tensor and return its handle for `synchronize`. See `broadcast`."""
    sent = check_movable(tensor)
    output = sent.clone() if basics.rank() == root_rank else torch.empty_like(sent)
    return _begin(output, root_rank, name, process_set)


class HorovodBroadcast(torch.autograd.Function):
    """A broadcast that gradients pass through: their mean at the root, zeros elsewhere."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        """Return the root's tensor."""
        ctx.options = root_rank, process_set
        received: torch.Tensor = synchronize(broadcast_async(tensor, root_rank, name, process_set))
        return received

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        """Return the mean of the gradients, or zeros."""
        root_rank, process_set = ctx.options
        mean = allreduce(grad_output.contiguous(), op=Average, process_set=process_set)
        return mean if basics.rank() == root_rank else torch.zeros_like(mean), None, None, None


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the `tensor` of rank `root_rank`. Autograd passes through it.

    Args:
        tensor: the same shape and dtype on all ranks.
        root_rank: the rank whose tensor is sent, counted among all ranks.
        name: the same on all ranks; by default a counter makes one.
        process_set: the ranks that take part.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        ValueError: the root is not a member of the process set.
        HorovodInternalError: the ranks disagree on the root, or a rank is gone.
    """
    received: torch.Tensor = HorovodBroadcast.apply(tensor, root_rank, name, process_set)
    return received


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a broadcast in place and return its handle for `synchronize`. See `broadcast`."""
    return _begin(tensor, root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Overwrite `tensor` with that of rank `root_rank` and return it. See `broadcast`."""
    received: torch.Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return received
