"""Allreduce of a list of tensors that run all or none, under one handle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...common.process_sets import ProcessSet, global_process_set
from ..compression import Compression, Compressor, check_compression, codec_for
from .allreduce import begin_allreduce
from .handles import handles, synchronize
from .tensors import check_list, handle_average_backwards_compatibility


def names_of_group(operation: str, name: str | None, process_set: ProcessSet, count: int) -> list[str]:
    """Return the engine's names of the members of a group."""
    base = handles.name(operation, name, process_set)
    return [f"{base}_{i + 1}of{count}" for i in range(count)]


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin an allreduce of all `tensors` into new ones and return the handle of the group."""
    op = handle_average_backwards_compatibility(op, average)
    found = check_list(tensors)
    return begin_allreduce(
        found,
        names_of_group("grouped_allreduce", name, process_set, len(found)),
        op=op,
        in_place=False,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        grouped=True,
    )


@dataclass(frozen=True)
class _Options:
    """What all members of a group have in common, and the codec of each."""

    name: str | None
    op: int
    prescale_factor: float
    postscale_factor: float
    process_set: ProcessSet
    codecs: Sequence[str] | None = None


def _reduce(ctx: Any, options: _Options, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    ctx.options = options
    handle = begin_allreduce(
        tensors,
        names_of_group("grouped_allreduce", options.name, options.process_set, len(tensors)),
        op=options.op,
        in_place=False,
        prescale_factor=options.prescale_factor,
        postscale_factor=options.postscale_factor,
        process_set=options.process_set,
        codecs=options.codecs,
        grouped=True,
    )
    return tuple(synchronize(handle))


def _reduce_gradients(ctx: Any, gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    options: _Options = ctx.options
    return grouped_allreduce(
        [gradient.contiguous() for gradient in gradients],
        op=options.op,
        prescale_factor=options.prescale_factor,
        postscale_factor=options.postscale_factor,
        process_set=options.process_set,
    )


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
        return _reduce(ctx, _Options(name, op, prescale_factor, postscale_factor, process_set), tensors)

    @staticmethod
    def backward(ctx: Any, *grad_output: torch.Tensor) -> tuple[Any, ...]:
        """Return the reduced gradients."""
        return (None, None, None, None, None, None, *_reduce_gradients(ctx, grad_output))


class _CodedGroupedAllreduce(torch.autograd.Function):
    """The same with codecs on the way; the gradients travel exactly."""

    @staticmethod
    def forward(ctx: Any, options: _Options, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _reduce(ctx, options, tensors)

    @staticmethod
    def backward(ctx: Any, *grad_output: torch.Tensor) -> tuple[Any, ...]:
        return (None, *_reduce_gradients(ctx, grad_output))


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
    """Return the reductions of all `tensors`, which travel together. See `allreduce`."""
    op = handle_average_backwards_compatibility(op, average)
    compression = check_compression(compression)
    pairs = [compression.compress(tensor) for tensor in check_list(tensors)]
    compressed = [each for each, _ in pairs]
    codecs = [codec_for(compression, each) for each in compressed]
    options = _Options(name, op, prescale_factor, postscale_factor, process_set, codecs)
    reduced = _CodedGroupedAllreduce.apply(options, *compressed)
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
    """Begin an allreduce of all `tensors` in place and return the handle of the group."""
    op = handle_average_backwards_compatibility(op, average)
    found = check_list(tensors)
    return begin_allreduce(
        found,
        names_of_group("grouped_allreduce", name, process_set, len(found)),
        op=op,
        in_place=True,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        grouped=True,
    )


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce all `tensors` in place and return them."""
    op = handle_average_backwards_compatibility(op, average)
    handle = grouped_allreduce_async_(tensors, None, name, op, prescale_factor, postscale_factor, process_set)
    reduced: list[torch.Tensor] = synchronize(handle)
    return reduced
