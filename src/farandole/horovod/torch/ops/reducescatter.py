"""Reducescatter: every rank gets its part of the rows of the sum or mean."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch

from ....comm.named_ops.operations import Request
from ...common.compression import CodecCompressor, Compressor, check_compression
from ...common.exceptions import HorovodUnsupportedError
from ...common.operations import names_of_group, operation_names, set_number
from ...common.process_sets import ProcessSet, global_process_set
from ...common.reductions import Average, Sum, check_sum_or_average, reduction_of
from ..compression import Compression
from .allgather import allgather, grouped_allgather
from .allreduce import ReduceOptions
from .handles import check_list, check_reducible, handles, synchronize


def _begin(tensors: Sequence[torch.Tensor], names: Sequence[str], options: ReduceOptions, *, grouped: bool) -> int:
    check_sum_or_average(options.op)
    number = set_number(options.process_set, "Reducescatter")
    requests = []
    for tensor, name in zip(tensors, names, strict=True):
        if tensor.dim() == 0:
            raise HorovodUnsupportedError("Reducescatter does not support scalar inputs (give them a dimension)")
        requests.append(
            Request(
                name,
                "reducescatter",
                check_reducible(tensor, options.op),
                reduction=reduction_of(options.op),
                prescale=options.prescale_factor,
                postscale=options.postscale_factor,
                process_set=number,
            )
        )
    return handles.submit(requests, list if grouped else itemgetter(0))


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a reducescatter and return its handle for `synchronize`. See `reducescatter`."""
    names = [operation_names.name("reducescatter", name, process_set)]
    return _begin(
        [tensor], names, ReduceOptions(op, prescale_factor, postscale_factor, process_set), grouped=False
    )


class HorovodReducescatter(torch.autograd.Function):
    """A reducescatter that gradients pass through: gathered; times the size for Sum, as in Horovod."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        name: str | None,
        op: int,
        process_set: ProcessSet,
        prescale_factor: float,
        postscale_factor: float,
    ) -> torch.Tensor:
        """Return this rank's rows."""
        ctx.options = ReduceOptions(op, prescale_factor, postscale_factor, process_set)
        part: torch.Tensor = synchronize(
            reducescatter_async(tensor, name, op, process_set, prescale_factor, postscale_factor)
        )
        return part

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradient of all rows."""
        scale = _gradient_scale(ctx.options)
        gathered = allgather((grad_output * scale).contiguous(), process_set=ctx.options.process_set)
        return gathered, None, None, None, None, None


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's rows of the mean or sum of all ranks' `tensor`.

    Args:
        tensor: shape (rows, ...), the same on all ranks.
        name: the same on all ranks; by default a counter makes one.
        compression: Compression.none, fp16 or bf16; codecs such as int8 work with allreduce only.
        op: Average (the default) or Sum.
        process_set: the ranks that take part.
        prescale_factor: multiplied before the reduction.
        postscale_factor: multiplied after the reduction.

    Returns:
        A new tensor with this rank's rows; the first ``rows % size`` ranks get one row more than the others.
    """
    compressed, context = _compress([tensor], compression)[0]
    part = HorovodReducescatter.apply(compressed, name, op, process_set, prescale_factor, postscale_factor)
    restored: torch.Tensor = compression.decompress(part, context)
    return restored


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a reducescatter of all `tensors` and return the handle of the group. See `reducescatter`.

    The operations of a group run completely or not at all.
    """
    tensors = check_list(tensors)
    names = names_of_group("grouped_reducescatter", name, process_set, len(tensors))
    return _begin(tensors, names, ReduceOptions(op, prescale_factor, postscale_factor, process_set), grouped=True)


class HorovodGroupedReducescatter(torch.autograd.Function):
    """A grouped reducescatter that gradients pass through."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: int,
        process_set: ProcessSet,
        prescale_factor: float,
        postscale_factor: float,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Return this rank's rows of each tensor."""
        ctx.options = ReduceOptions(op, prescale_factor, postscale_factor, process_set)
        handle = grouped_reducescatter_async(tensors, name, op, process_set, prescale_factor, postscale_factor)
        return tuple(synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *grad_output: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients of all rows."""
        scale = _gradient_scale(ctx.options)
        gathered = grouped_allgather(
            [(grad * scale).contiguous() for grad in grad_output], process_set=ctx.options.process_set
        )
        return None, None, None, None, None, *gathered


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Return this rank's rows for each of `tensors`. See `reducescatter`."""
    pairs = _compress(check_list(tensors), compression)
    parts = HorovodGroupedReducescatter.apply(
        name, op, process_set, prescale_factor, postscale_factor, *(each for each, _ in pairs)
    )
    return [compression.decompress(part, context) for part, (_, context) in zip(parts, pairs, strict=True)]


def _gradient_scale(options: ReduceOptions) -> float:
    size = options.process_set.size() if options.op == Sum else 1
    assert size is not None, "the set of an operation that ran is registered"
    return float(size * options.prescale_factor * options.postscale_factor)


def _compress(tensors: Sequence[torch.Tensor], compression: Any) -> list[tuple[torch.Tensor, Any]]:
    compression = check_compression(compression)
    if isinstance(compression, CodecCompressor) and not compression.spec.is_exact:
        raise ValueError(
            f"compression={compression!r} works with allreduce; for a reducescatter use Compression.fp16 or bf16"
        )
    return [compression.compress(tensor) for tensor in tensors]
