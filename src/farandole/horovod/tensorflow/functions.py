"""Variables and objects from one rank to all."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

from ..common import objects
from ..common.process_sets import ProcessSet, global_process_set
from ..exchange.names import broadcast_arrays, label_of
from .errors import refuse_session, session_refused, translated
from .installed import tf
from .ops.allreduce import broadcast
from .ops.inputs import list_of_variables, not_converted


@not_converted
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Overwrite variables with those of rank `root_rank`.

    Args:
        variables: of TensorFlow or of Keras, the same on all ranks.
        root_rank: the rank whose variables are sent.
        process_set: the ranks that take part.
        inplace: ignored: variables are always overwritten.

    Returns:
        None; in a `tf.function` the operation that does it.
    """
    given = list_of_variables(variables, "broadcast_variables")
    if not given:
        warnings.warn(
            "farandole: broadcast_variables was given no variables: a model has some after it was built",
            RuntimeWarning,
            stacklevel=2,
        )
    if not tf.executing_eagerly():
        return tf.group(
            *[
                each.assign(broadcast(tf.convert_to_tensor(each), root_rank, process_set=process_set))
                for each in given
            ]
        )
    with translated("HorovodBroadcast"):
        values = broadcast_arrays(
            [label_of(each) for each in given],
            [tf.convert_to_tensor(each).numpy() for each in given],
            root_rank,
            process_set,
        )
    for variable, value in zip(given, values, strict=True):
        variable.assign(value)
    return None


def broadcast_global_variables(root_rank: int) -> Any:
    """Raise: only graphs of TensorFlow 1 have global variables.

    Raises:
        RuntimeError: in Horovod's words; it names `broadcast_variables`.
        NotImplementedError: while a graph of TensorFlow 1 is made.
    """
    refuse_session("broadcast_global_variables")
    raise RuntimeError(
        "hvd.broadcast_global_variables() does not support eager execution. Please use "
        "`hvd.broadcast_variables(<model/optimizer variables>)` instead."
    )


class BroadcastGlobalVariablesHook:
    """A name of Horovod's for sessions of TensorFlow 1, which are not supported: to make one is an error."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        """Raise NotImplementedError."""
        raise session_refused("BroadcastGlobalVariablesHook")


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return a function of an object that returns the object of rank `root_rank`. See `broadcast_object`.

    Args:
        root_rank: the rank whose object is sent.
        session: ignored; Horovod has this argument.
        name: the same on all ranks; by default a counter makes one.
        process_set: the ranks that take part.
    """

    def broadcast_it(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, session, name, process_set)

    return broadcast_it


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of rank `root_rank`. It is pickled.

    Args:
        obj: any object that can be pickled; only the root's is used.
        root_rank: the rank whose object is sent.
        session: ignored; Horovod has this argument.
        name: the same on all ranks; by default a counter makes one.
        process_set: the ranks that take part.
    """
    with translated("HorovodBroadcast"):
        return objects.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all members of `process_set`, in rank order. They are pickled.

    Args:
        obj: any object that can be pickled.
        session: ignored; Horovod has this argument.
        name: the same on all ranks; by default a counter makes one.
        process_set: the ranks that take part.
    """
    with translated("HorovodAllgather"):
        return objects.allgather_object(obj, name, process_set)
