"""Operations on rows: allgather, alltoall, reducescatter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...common.compression import CodecCompressor, check_compression, name_of
from ...common.process_sets import ProcessSet, global_process_set
from ...common.reductions import Average, Sum, check_sum_or_average, reduction_of
from ..compression import Compression
from ..installed import tf
from .call import OperationCall
from .inputs import (
    as_tensor,
    as_tensors,
    check_group,
    invalid,
    not_converted,
    rank_in,
    refuse_scalar,
    rows_unknown,
    size_of,
)
from .run import run


@not_converted
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the rows (first dimension) of all ranks' `tensor`, concatenated in rank order.

    The gradient of the result is averaged over the ranks, as in Horovod, not summed.

    Args:
        tensor: shape (rows, ...); the number of rows may differ between ranks, the other dimensions may not.
        name: the same on all ranks; by default a counter makes one, in graphs the name of the tensor.
        ignore_name_scope: whether the name is without the scopes of the graph.
        process_set: the ranks that take part.

    Returns:
        A tensor of shape (rows of all ranks, ...) and the same type.
    """
    return _gather([tensor], name, ignore_name_scope, process_set, grouped=False)[0]


@not_converted
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the rows of all ranks' tensors, one result for each of `tensors`. See `allgather`."""
    if not check_group(tensors, "HorovodAllgather"):
        return []
    return _gather(tensors, name, ignore_name_scope, process_set, grouped=True)


def _gather(
    tensors: Sequence[Any], name: str | None, ignore_name_scope: bool, process_set: ProcessSet, *, grouped: bool
) -> list[Any]:
    given = as_tensors(tensors, "HorovodAllgather")
    for tensor in given:
        refuse_scalar(tensor, "HorovodAllgather")
    call = OperationCall("allgather", process_set, name, ignore_name_scope=ignore_name_scope, grouped=grouped)

    def gradient(*grads: Any) -> list[Any]:
        own = None if name is None else f"{name}_grad"
        return [
            _my_rows(grad, tensor, None if own is None else f"{own}_{place}", ignore_name_scope, process_set)
            for place, (grad, tensor) in enumerate(zip(grads, given, strict=True))
        ]

    return run(call, given, gradient, shapes=[rows_unknown(tensor) for tensor in given])


def _my_rows(grad: Any, tensor: Any, name: str | None, ignore_name_scope: bool, process_set: ProcessSet) -> Any:
    """Return this rank's rows of the mean gradient."""
    mean = OperationCall(
        "allreduce", process_set, name, ignore_name_scope=ignore_name_scope, reduction=reduction_of(Average)
    )

    def again(second: Any) -> Any:
        return run(mean, [second], again)[0]

    averaged = run(mean, [grad], again)[0]
    rows = tf.shape(tensor)[:1]
    all_rows = allgather(rows, None if name is None else f"{name}_rows", ignore_name_scope, process_set)
    begin = tf.reduce_sum(all_rows[: rank_in(process_set)])
    return averaged[begin : begin + rows[0]]


# Alltoall: every rank sends some of its rows to each, and gets what they send to it.


@not_converted
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows of `tensor` to each rank and return the received rows, in rank order.

    Args:
        tensor: shape (rows, ...); rows are sent in rank order.
        splits: number of rows for each rank, int32; by default the same for all.
        name: the same on all ranks; by default a counter makes one, in graphs the name of the tensor.
        ignore_name_scope: whether the name is without the scopes of the graph.
        process_set: the ranks that take part.

    Returns:
        Without `splits` the received rows. With `splits` the pair ``(output, received_splits)``.
    """
    given = as_tensor(tensor, "HorovodAlltoall")
    refuse_scalar(given, "HorovodAlltoall")
    call = OperationCall("alltoall", process_set, name, ignore_name_scope=ignore_name_scope)
    sent = [given]
    if splits is not None:
        splits = tf.convert_to_tensor(splits)
        if splits.dtype != tf.int32:
            raise invalid("HorovodAlltoall", f"splits are {splits.dtype.name}, expected int32")
        sent.append(splits)
    received: list[Any] = []

    def gradient(grad: Any, _: Any = None) -> Any:
        back, _ = alltoall(
            grad,
            tf.stop_gradient(received[1]),
            None if name is None else f"{name}_grad",
            ignore_name_scope,
            process_set,
        )
        unsent = tf.shape(given)[0] - tf.shape(back)[0]  # the last rows may go nowhere
        # TensorFlow lets scripts give a gradient of another type than the tensor's.
        padding = tf.zeros(tf.concat([[unsent], tf.shape(given)[1:]], 0), back.dtype)
        whole = tf.concat([back, padding], 0)
        return [whole, None] if len(sent) > 1 else whole

    received += run(
        call,
        sent,
        gradient,
        types=[given.dtype, tf.int32],
        shapes=[rows_unknown(given), tf.TensorShape([None])],
    )
    return tuple(received) if splits is not None else received[0]


# Reducescatter: every rank gets its part of the rows of the sum or mean.


@not_converted
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce every rank's `tensor` and return this rank's rows; the first ranks get one more where it is uneven.

    Args:
        tensor: shape (rows, ...), the same on all ranks.
        device_dense: ignored; Horovod has this argument.
        compression: one of `Compression`, but no codec.
        op: Average or Sum.
        name: the same on all ranks; by default a counter makes one, in graphs the name of the tensor.
        process_set: the ranks that take part.
        ignore_name_scope: whether the name is without the scopes of the graph.
        prescale_factor: multiplied before the reduction.
        postscale_factor: multiplied after the reduction.
    """
    factors = (prescale_factor, postscale_factor)
    return _scatter([tensor], compression, op, name, process_set, ignore_name_scope, factors, grouped=False)[0]


@not_converted
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Return this rank's rows of the reductions of all `tensors`. See `reducescatter`."""
    factors = (prescale_factor, postscale_factor)
    if not check_group(tensors, "HorovodReducescatter"):
        return []
    return _scatter(tensors, compression, op, None, process_set, False, factors, grouped=True)


def _scatter(
    tensors: Sequence[Any],
    compression: Any,
    op: int,
    name: str | None,
    process_set: ProcessSet,
    ignore_name_scope: bool,
    factors: tuple[float, float],
    *,
    grouped: bool,
) -> list[Any]:
    check_sum_or_average(op)
    compression = check_compression(compression)
    if isinstance(compression, CodecCompressor):
        raise ValueError(f"reducescatter with {name_of(compression)}: codecs carry allreduces alone")
    pairs = [compression.compress(each) for each in as_tensors(tensors, "HorovodReducescatter")]
    sent = [each for each, _ in pairs]
    for each in sent:
        refuse_scalar(each, "HorovodReducescatter")
    call = OperationCall(
        "reducescatter",
        process_set,
        name,
        ignore_name_scope=ignore_name_scope,
        grouped=grouped,
        reduction=reduction_of(op),
        prescale=factors[0],
        postscale=factors[1],
    )

    def gradient(*grads: Any) -> list[Any]:
        found = []
        for place, grad in enumerate(grads):
            own = None if name is None else f"{name}_grad_{place}"
            whole = allgather(grad, own, ignore_name_scope, process_set)
            if op == Sum:
                whole = whole * tf.cast(size_of(process_set), whole.dtype)
            found.append(whole * tf.cast(factors[0] * factors[1], whole.dtype))
        return found

    results = run(call, sent, gradient, shapes=[rows_unknown(each) for each in sent])
    return [compression.decompress(each, context) for each, (_, context) in zip(results, pairs, strict=True)]
