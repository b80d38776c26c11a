"""Allgather, of one tensor and of a group: every rank's rows, in the order of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...common.process_sets import ProcessSet, global_process_set
from ...common.reductions import Average, reduction_of
from ..calls.call import OperationCall
from ..calls.run import run
from ..installed import tf
from .inputs import as_tensors, check_group, not_converted, rank_in, refuse_scalar, rows_unknown


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
