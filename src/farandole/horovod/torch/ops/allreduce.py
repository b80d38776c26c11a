"""Allreduce, of one tensor and of a group.

[Note: average] Horovod divides in float64 and rounds to the tensor's type; integers are cut towards zero. The
engine does both; nothing is divided here. Its mean is over the members of the set, also while some have joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from ....core.vocabulary.codec_spec import NONE
from ...common.basics import basics
from ...common.compression import Compressor, check_compression
from ...common.operations import names_of_group, operation_names, set_number
from ...common.process_sets import ProcessSet, global_process_set
from ...common.reductions import Average, handle_average_backwards_compatibility, reduction_of
from ...named_ops.operations import Request
from ..compression import Compression, codec_for
from .handles import check_list, check_movable, check_reducible, handles, synchronize


class ReduceOptions(NamedTuple):
    """How tensors are reduced: `op` by Horovod's numbers, factors before and after it, and the process set."""

    op: int
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    process_set: ProcessSet = global_process_set


def begin_allreduce(
    tensors: Sequence[torch.Tensor],
    names: Sequence[str],
    options: ReduceOptions,
    *,
    in_place: bool,
    codecs: Sequence[str] | None = None,
    grouped: bool = False,
    chosen_with: str = "",
) -> int:
    """Begin an allreduce of `tensors` under the engine's own `names`, and return its handle.

    `synchronize` gives a list when `grouped`, else the one result; with `in_place` the tensors given here.
    `chosen_with`: see `Request`.
    """
    number = set_number(options.process_set, "Allreduce")
    requests = []
    for place, tensor in enumerate(tensors):
        check_reducible(tensor, options.op)
        requests.append(
            Request(
                names[place],
                "allreduce",
                tensor,
                in_place=in_place,
                reduction=reduction_of(options.op),
                prescale=options.prescale_factor,
                postscale=options.postscale_factor,
                process_set=number,
                codec=NONE if codecs is None else codecs[place],
                chosen_with=chosen_with,
            )
        )
    return handles.submit(requests, list if grouped else itemgetter(0))


def _begin(
    tensor: torch.Tensor, name: str | None, options: ReduceOptions, *, in_place: bool = False, codec: str = NONE
) -> int:
    names = [operation_names.name("allreduce", name, options.process_set)]
    return begin_allreduce([tensor], names, options, in_place=in_place, codecs=[codec])


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an allreduce into a new tensor and return its handle for `synchronize`. See `allreduce`."""
    op = handle_average_backwards_compatibility(op, average)
    return _begin(tensor, name, ReduceOptions(op, prescale_factor, postscale_factor, process_set))


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
        codec: str = NONE,
    ) -> torch.Tensor:
        """Return the reduced tensor."""
        op = handle_average_backwards_compatibility(op, average)
        ctx.options = ReduceOptions(op, prescale_factor, postscale_factor, process_set)
        reduced: torch.Tensor = synchronize(_begin(tensor, name, ctx.options, codec=codec))
        return reduced

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        """Return the reduced gradient."""
        reduced = allreduce(grad_output.contiguous(), **ctx.options._asdict())
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
    """Return the reduction of every rank's `tensor`. Autograd passes through it.

    Args:
        tensor: the same shape and dtype on all ranks.
        average: Horovod's old spelling of `op`: True is Average, False is Sum.
        name: the same on all ranks; by default a counter makes one.
        compression: one of `Compression`, or a class with ``compress`` and ``decompress``.
        op: Average (the default), Sum, Min, Max, Product or Adasum.
        prescale_factor: multiplied before the reduction, rounded to the tensor's dtype.
        postscale_factor: multiplied after the reduction.
        process_set: the ranks that take part.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        ValueError: this rank's arguments are invalid.
        HorovodInternalError: the ranks' requests differ, or a rank is gone; raised on all ranks.
    """
    op = handle_average_backwards_compatibility(op, average)
    compression = check_compression(compression)
    compressed, context = compression.compress(tensor)
    codec = codec_for(compression, compressed)
    reduced = HorovodAllreduce.apply(
        compressed, None, name, op, prescale_factor, postscale_factor, process_set, codec
    )
    restored: torch.Tensor = compression.decompress(reduced, context)
    return restored


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an allreduce in place and return its handle for `synchronize`. See `allreduce`."""
    op = handle_average_backwards_compatibility(op, average)
    return _begin(tensor, name, ReduceOptions(op, prescale_factor, postscale_factor, process_set), in_place=True)


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
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    reduced: torch.Tensor = synchronize(handle)
    return reduced


# Allreduce of a list of tensors that run all or none, under one handle.


def _begin_group(
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
    return _begin_group(tensors, name, ReduceOptions(op, prescale_factor, postscale_factor, process_set))


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
        return tuple(synchronize(_begin_group(tensors, name, ctx.options)))

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
        return tuple(synchronize(_begin_group(tensors, name, options, codecs=codecs)))

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
    return _begin_group(
        tensors, name, ReduceOptions(op, prescale_factor, postscale_factor, process_set), in_place=True
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
    """Reduce all `tensors` in place, together, and return them. See `allreduce`."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    reduced: list[torch.Tensor] = synchronize(handle)
    return reduced


# Broadcast: every rank gets the root's tensor. The root is a rank of the job, also inside a process set.


def _begin_broadcast(given: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> int:
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
    return _begin_broadcast(output, root_rank, name, process_set)


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
    return _begin_broadcast(tensor, root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Overwrite `tensor` with that of rank `root_rank` and return it. See `broadcast`."""
    received: torch.Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return received
