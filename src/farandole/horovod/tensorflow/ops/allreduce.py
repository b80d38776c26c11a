"""Allreduce, of one tensor and of a group; of `tf.IndexedSlices` by allgather; broadcast; join."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ....core.vocabulary.codec_spec import NONE
from ....core.vocabulary.errors import CommError, ConfigError
from ...common.basics import basics
from ...common.compression import CodecCompressor, check_compression
from ...common.exceptions import from_comm_error
from ...common.operations import operation_names
from ...common.process_sets import ProcessSet, global_process_set
from ...common.reductions import (
    Adasum,
    Average,
    Sum,
    handle_average_backwards_compatibility,
    reduction_of,
)
from ..compression import Compression
from ..installed import tf
from .call import OperationCall
from .gather_scatter import allgather
from .inputs import as_tensor, as_tensors, check_group, list_of_variables, not_converted, rank_in, size_of
from .run import name_here, run


@not_converted
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Return the reduction of every rank's `tensor`. Gradients pass through it.

    Args:
        tensor: the same shape and type on all ranks; or `tf.IndexedSlices`, whose rows are gathered.
        average: Horovod's old spelling of `op`: True is Average, False is Sum.
        device_dense: ignored; Horovod has this argument.
        device_sparse: ignored, as before.
        compression: one of `Compression`, or a class with ``compress`` and ``decompress``.
        op: Average (the default), Sum, Min, Max, Product or Adasum.
        prescale_factor: multiplied before the reduction, rounded to the tensor's type.
        postscale_factor: multiplied after the reduction.
        name: the same on all ranks; by default a counter makes one, in graphs the name of the tensor.
        process_set: the ranks that take part.
        ignore_name_scope: whether the name is without the scopes of the graph.

    Returns:
        A tensor of the same shape and type.

    Raises:
        tf.errors.InvalidArgumentError: this rank's arguments are invalid.
        tf.errors.FailedPreconditionError: the ranks asked for different things; raised on all ranks.
    """
    op = handle_average_backwards_compatibility(op, average)
    if isinstance(tensor, tf.IndexedSlices):
        if prescale_factor != 1.0 or postscale_factor != 1.0:
            raise NotImplementedError("Pre/postscale_factor are not supported with tf.IndexedSlices")
        return sparse_allreduce(tensor, op, name, process_set, ignore_name_scope)
    compression = check_compression(compression)
    sent, context = compression.compress(as_tensor(tensor, "HorovodAllreduce"))
    call = OperationCall(
        "allreduce",
        process_set,
        name,
        ignore_name_scope=ignore_name_scope,
        reduction=reduction_of(op),
        prescale=prescale_factor,
        postscale=postscale_factor,
        codec=_codec(compression),
    )

    def gradient(grad: Any) -> Any:
        return allreduce(
            grad,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            name=None if name is None else f"{name}_grad",
            process_set=process_set,
            ignore_name_scope=ignore_name_scope,
        )

    return compression.decompress(run(call, [sent], gradient)[0], context)


@not_converted
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Return the reductions of all `tensors`, which run all or none. See `allreduce`.

    Dense tensors and `tf.IndexedSlices` may be mixed; results are in the same places.
    """
    if not check_group(tensors, "HorovodGroupedAllreduce"):
        return []
    op = handle_average_backwards_compatibility(op, average)
    results: list[Any] = list(tensors)
    dense = [place for place, each in enumerate(tensors) if not isinstance(each, tf.IndexedSlices)]
    for place, each in enumerate(tensors):
        if place not in dense:
            own = None if name is None else f"{name}_{place}"
            results[place] = allreduce(
                each,
                op=op,
                prescale_factor=prescale_factor,
                postscale_factor=postscale_factor,
                name=own,
                process_set=process_set,
                ignore_name_scope=ignore_name_scope,
            )
    if dense:
        options = (op, prescale_factor, postscale_factor, process_set, ignore_name_scope)
        reduced = _reduce_dense([tensors[place] for place in dense], compression, options, name)
        for place, each in zip(dense, reduced, strict=True):
            results[place] = each
    return results


def _reduce_dense(
    tensors: Sequence[Any], compression: Any, options: tuple[int, float, float, ProcessSet, bool], name: str | None
) -> list[Any]:
    op, prescale, postscale, process_set, ignore_name_scope = options
    compression = check_compression(compression)
    pairs = [compression.compress(each) for each in as_tensors(tensors, "HorovodGroupedAllreduce")]
    call = OperationCall(
        "allreduce",
        process_set,
        name,
        ignore_name_scope=ignore_name_scope,
        grouped=True,
        reduction=reduction_of(op),
        prescale=prescale,
        postscale=postscale,
        codec=_codec(compression),
    )

    def gradient(*grads: Any) -> list[Any]:
        return _reduce_dense(grads, Compression.none, options, None if name is None else f"{name}_grad")

    reduced = run(call, [sent for sent, _ in pairs], gradient)
    return [compression.decompress(each, context) for each, (_, context) in zip(reduced, pairs, strict=True)]


@not_converted
def summed(tensor: Any, name: str) -> Any:
    """Return the sum over all ranks. Its name is the same whatever scopes it is in, so `name` must be unique."""
    return _summed(tensor, f"allreduce.{name_here(name)}")


def _summed(tensor: Any, own_name: str) -> Any:
    call = OperationCall("allreduce", own_name=own_name, reduction="sum")

    def gradient(grad: Any) -> Any:
        return _summed(grad, f"{own_name}_grad")

    return run(call, [tensor], gradient)[0]


def sparse_allreduce(
    slices: Any,
    op: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Return the rows of all ranks, one after the other; a row that several have is there several times."""
    if op == Adasum:
        raise NotImplementedError(
            "The Adasum reduction does not currently support sparse tensors. As a workaround please pass "
            "sparse_as_dense=True to DistributedOptimizer"
        )
    if op not in (Average, Sum):
        raise NotImplementedError("Only Sum and Average ops are supported with tf.IndexedSlices")
    names = (None, None) if name is None else (f"{name}.values", f"{name}.indices")
    values = allgather(slices.values, names[0], ignore_name_scope, process_set)
    indices = allgather(slices.indices, names[1], ignore_name_scope, process_set)
    if op == Average:
        values = values / tf.cast(size_of(process_set), values.dtype)
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


def _codec(compression: Any) -> str:
    return compression.text if isinstance(compression, CodecCompressor) else NONE


# Broadcast: every rank gets the root's tensor. The root is a rank of the job, also inside a process set.


@not_converted
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the `tensor` of rank `root_rank`. Gradients pass through: their mean at the root, zeros elsewhere.

    Args:
        tensor: the same shape and type on all ranks.
        root_rank: the rank whose tensor is sent, counted among all ranks.
        name: the same on all ranks; by default a counter makes one, in graphs the name of the tensor.
        ignore_name_scope: whether the name is without the scopes of the graph.
        process_set: the ranks that take part.
    """
    call = OperationCall("broadcast", process_set, name, ignore_name_scope=ignore_name_scope, root=root_rank)

    def gradient(grad: Any) -> Any:
        mean = allreduce(
            grad,
            op=Average,
            name=None if name is None else f"{name}_grad",
            process_set=process_set,
            ignore_name_scope=ignore_name_scope,
        )
        here = rank_in(global_process_set)
        return tf.where(here == root_rank, mean, tf.zeros_like(mean))

    return run(call, [as_tensor(tensor, "HorovodBroadcast")], gradient)[0]


@not_converted
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Overwrite `variables` with those of rank `root_rank`, and return their values.

    Args:
        variables: of TensorFlow or of Keras, the same on all ranks.
        root_rank: the rank whose variables are sent.
        name: the same on all ranks; by default a counter makes one.
        process_set: the ranks that take part.
    """
    given = list_of_variables(variables, "broadcast_")
    received = []
    for place, variable in enumerate(given):
        own = None if name is None else f"{name}_{place}"
        value = broadcast(tf.convert_to_tensor(variable), root_rank, own, process_set=process_set)
        variable.assign(value)
        received.append(value)
    return received


# Join: a rank that is out of data lets the others go on.


@not_converted
def join() -> Any:
    """Mark this rank as out of data, and wait until all ranks have joined.

    Until then this rank contributes zeros to the allreduces of the others, whose Average still divides by the
    number of all ranks.

    Returns:
        The rank that joined last, an int32 scalar, the same on all ranks.
    """
    if tf.executing_eagerly():
        return tf.constant(_join(), tf.int32)
    last = tf.numpy_function(lambda: np.int32(_join()), [], tf.int32, name="HorovodJoin")
    last.set_shape([])
    return last


def _join() -> int:
    try:
        last: int = basics.running.engine.join().wait()
    except ConfigError as problem:
        raise ValueError(str(problem)) from problem
    except CommError as problem:
        raise from_comm_error(problem) from problem
    operation_names.all_joined()
    return last
