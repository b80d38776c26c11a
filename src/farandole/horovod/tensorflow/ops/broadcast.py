"""Broadcast: every rank gets the root's tensor. The root is a rank of the job, also inside a process set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...common.process_sets import ProcessSet, global_process_set
from ...common.reductions import Average
from ..calls.call import OperationCall
from ..calls.run import run
from ..installed import tf
from .allreduce import allreduce
from .inputs import as_tensor, list_of_variables, not_converted, rank_in


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
