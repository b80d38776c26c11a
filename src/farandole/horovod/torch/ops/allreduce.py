"""Allreduce, of one tensor and of a group.

[Note: average] Horovod divides in float64 and rounds to the tensor's type; integers are cut towards zero. The
engine does both; nothing is divided here. Its mean is over the members of the set, also while some have joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch

from ....comm.named_ops.operations.request import Request
from ...common.process_sets import ProcessSet, global_process_set
from ..compression import Compression, Compressor, check_compression, codec_for
from .handles import handles, set_number, synchronize
from .tensors import check_reducible, handle_average_backwards_compatibility, reduction_of


def begin_allreduce(
    tensors: Sequence[torch.Tensor],
    names: Sequence[str],
    *,
    op: int,
    in_place: bool,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    codecs: Sequence[str] | None = None,
    grouped: bool = False,
) -> int:
    """Begin an allreduce of `tensors` under the engine's own `names`, and return its handle.

    `synchronize` gives a list when `grouped`, else the one result; with `in_place` the tensors given here.
    """
    number = set_number(process_set, "Allreduce")
    requests = []
    for place, tensor in enumerate(tensors):
        check_reducible(tensor, op)
        requests.append(
            Request(
                names[place],
                "allreduce",
                tensor,
                in_place=in_place,
                reduction=reduction_of(op),
                prescale=prescale_factor,
                postscale=postscale_factor,
                process_set=number,
                codec="none" if codecs is None else codecs[place],
            )
        )
    return handles.submit(requests, list if grouped else itemgetter(0))


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin an allreduce into a new tensor and return its handle. See `allreduce`."""
    op = handle_average_backwards_compatibility(op, average)
    names = [handles.name("allreduce", name, process_set)]
    return begin_allreduce(
        [tensor],
        names,
        op=op,
        in_place=False,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )


class HorovodAllreduce(torch.autograd.Function):
    """An allreduce that gradients pass through: the gradient is the same allreduce of the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        average: bool | None,
        name: str | None,
        op: int | None,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
        codec: str = "none",
    ) -> torch.Tensor:
        """Return the reduced tensor."""
        op = handle_average_backwards_compatibility(op, average)
        ctx.options = op, prescale_factor, postscale_factor, process_set
        names = [handles.name("allreduce", name, process_set)]
        handle = begin_allreduce(
            [tensor],
            names,
            op=op,
            in_place=False,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
            codecs=[codec],
        )
        reduced: torch.Tensor = synchronize(handle)
        return reduced

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        """Return the reduced gradient."""
        op, prescale_factor, postscale_factor, process_set = ctx.options
        reduced = allreduce(
            grad_output.contiguous(),
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
        )
        return reduced, None, None, None, None, None, None, None


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the reduction of every rank's `tensor`, a new tensor of the same shape and type.

    `op` is Average (the default), Sum, Min, Max, Product or Adasum. `prescale_factor` multiplies before the
    reduction, rounded to the tensor's type, `postscale_factor` after it. `name` must be the same on all
    ranks. Raises ValueError for what this rank alone can see is wrong, `HorovodInternalError` on all ranks
    when they asked for different things or one is gone. Gradients pass through it.
    """
    op = handle_average_backwards_compatibility(op, average)
    compression = check_compression(compression)
    compressed, context = compression.compress(tensor)
    reduced = HorovodAllreduce.apply(
        compressed,
        None,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        codec_for(compression, compressed),
    )
    return compression.decompress(reduced, context)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin an allreduce in place and return its handle. See `allreduce`."""
    op = handle_average_backwards_compatibility(op, average)
    names = [handles.name("allreduce", name, process_set)]
    return begin_allreduce(
        [tensor],
        names,
        op=op,
        in_place=True,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce `tensor` in place and return it. See `allreduce`."""
    op = handle_average_backwards_compatibility(op, average)
    handle = allreduce_async_(tensor, None, name, op, prescale_factor, postscale_factor, process_set)
    reduced: torch.Tensor = synchronize(handle)
    return reduced
