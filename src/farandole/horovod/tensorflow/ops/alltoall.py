"""Alltoall: every rank sends some of its rows to each, and gets what they send to it."""

from __future__ import annotations

from typing import Any

from ...common.process_sets import ProcessSet, global_process_set
from ..calls.call import OperationCall
from ..calls.run import run
from ..installed import tf
from .inputs import as_tensor, invalid, not_converted, refuse_scalar, rows_unknown


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
