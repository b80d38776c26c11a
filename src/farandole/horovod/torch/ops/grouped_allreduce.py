"""Allreduce of a list of tensors that run all or none, under one handle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...common.compression import Compressor, check_compression
from ...common.operations import names_of_group
from ...common.process_sets import ProcessSet, global_process_set
from ...common.reductions import handle_average_backwards_compatibility
from ..compression import Compression, codec_for
from .allreduce import ReduceOptions, begin_allreduce
from .handles import check_list, synchronize


def _begin(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    options: ReduceOptions,
    *,
    in_place: bool = False,
    codecs: Sequence[str] | None = None,
) -> int:
    tensors = check_list(tensors)
    names = names_of_group("grouped_allreduce", name, options.process_set, len(tensors))
    return begin_allreduce(tensors, names, options, in_place=in_place, codecs=codecs, grouped=True)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an allreduce of all `tensors` into new ones; return the handle of the group. See `allreduce`."""
    op = handle_average_backwards_compatibility(op, average)
    return _begin(tensors, name, ReduceOptions(op, prescale_factor, postscale_factor, process_set))


def _reduce_gradients(ctx: Any, gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return grouped_allreduce([gradient.contiguous() for gradient in gradients], **ctx.options._asdict())


class HorovodGroupedAllreduce(torch.autograd.Function):
    """A grouped allreduce that gradients pass through: they are reduced alike."""

    @staticmethod
    def forward(
        ctx: Any,
        average: bool | None,
        name: str | None,
        op: int | None,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Return the reduced tensors."""
        op = handle_average_backwards_compatibility(op, average)
        ctx.options = ReduceOptions(op, prescale_factor, postscale_factor, process_set)
        return tuple(synchronize(_begin(tensors, name, ctx.options)))

    @staticmethod
    def backward(ctx: Any, *grad_output: torch.Tensor) -> tuple[Any, ...]:
        """Return the reduced gradients."""
        return (None, None, None, None, None, None, *_reduce_gradients(ctx, grad_output))


class _CodedGroupedAllreduce(torch.autograd.Function):
    """The same with codecs on the way; the gradients travel exactly."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, options: ReduceOptions, codecs: Sequence[str], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.options = options
        return tuple(synchronize(_begin(tensors, name, options, codecs=codecs)))

    @staticmethod
    def backward(ctx: Any, *grad_output: torch.Tensor) -> tuple[Any, ...]:
        return (None, None, None, *_reduce_gradients(ctx, grad_output))


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Return the reductions of all `tensors`, which are exchanged together. See `allreduce`."""
    op = handle_average_backwards_compatibility(op, average)
    compression = check_compression(compression)
    pairs = [compression.compress(tensor) for tensor in check_list(tensors)]
    compressed = [each for each, _ in pairs]
    codecs = [codec_for(compression, each) for each in compressed]
    options = ReduceOptions(op, prescale_factor, postscale_factor, process_set)
    reduced = _CodedGroupedAllreduce.apply(name, options, codecs, *compressed)
    return [compression.decompress(each, context) for each, (_, context) in zip(reduced, pairs, strict=True)]


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an allreduce of all `tensors` in place and return the handle of the group. See `allreduce`."""
    op = handle_average_backwards_compatibility(op, average)
    return _begin(tensors, name, ReduceOptions(op, prescale_factor, postscale_factor, process_set), in_place=True)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce all `tensors` in place, together, and return them. See `allreduce`."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    reduced: list[torch.Tensor] = synchronize(handle)
    return reduced
