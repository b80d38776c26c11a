"""Operations on rows: allgather, alltoall, reducescatter; sparse tensors by allgather."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from ...common.compression import CodecCompressor, Compressor, check_compression
from ...common.exceptions import HorovodUnsupportedError
from ...common.operations import names_of_group, operation_names, set_number
from ...common.process_sets import ProcessSet, global_process_set
from ...common.reductions import Average, Sum, check_sum_or_average, reduction_of
from ...named_ops.operations import Request
from ..compression import Compression
from .allreduce import ReduceOptions, allreduce, grouped_allreduce
from .handles import check_list, check_movable, check_reducible, handles, synchronize, wait_for_all


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


# Allreduce of a sparse tensor: the indices and values of all ranks, one after the other.


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start the reduction of a sparse COO tensor.

    Args:
        tensor: a sparse tensor, the same shape and dtype on all ranks.
        name: the same on all ranks; None: a counter makes one.
        op: Average or Sum.
        process_set: the ranks that take part.

    Returns:
        A function that waits and returns the reduced sparse tensor. It is not coalesced: an index that several
        ranks have occurs several times.

    Raises:
        ValueError: the tensor is not sparse, or `op` is another one.
    """
    if not tensor.is_sparse:
        raise ValueError(f"sparse_allreduce_async: expected a sparse tensor, got {tensor.type()}")
    if op not in (Average, Sum):
        raise ValueError(f"sparse_allreduce_async: op={op!r}, expected Average or Sum")
    # No sum of duplicates here, and no copy: indices and values are taken as they are.
    indices, values = tensor._indices(), tensor._values()
    names = (None, None) if name is None else (f"{name}.indices", f"{name}.values")
    indices_handle = allgather_async(indices.t().contiguous(), names[0], process_set)
    values_handle = allgather_async(values.contiguous(), names[1], process_set)

    def wait() -> torch.Tensor:
        both = (partial(synchronize, handle) for handle in (indices_handle, values_handle))
        all_indices, all_values = wait_for_all(both)
        if op == Average:
            all_values = all_values / process_set.size()
        return torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape)

    return wait


# Alltoall: every rank sends some of its rows to each, and gets what they send to it.


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


# Reducescatter: every rank gets its part of the rows of the sum or mean.


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
