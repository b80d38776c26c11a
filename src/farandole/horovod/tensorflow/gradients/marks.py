"""Marks in a graph: how many rows a batch has, and when its loss was known. For the records.

[Note: a mark] An operation of ours in C++ that reads the clock and the batch's number of rows, and keeps both
until Python asks at the end of the batch. It runs when its input is there: the first argument of the step that
Keras traces, and then the loss. The gradient of the loss passes through the second one, so no graph drops them,
and backward begins after it; values stay the same. Where there is no such operation (without a compiler, on a
machine with a GPU, in an XLA program) nothing is marked.

The time of the first one says only that the batch was there before: nothing waits for it, and with few threads
TensorFlow runs it long after. So the wait for data stays unknown.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

from ...exchange import step_watch
from ...exchange.step_watch import Mark, quietly, tell
from ..calls.library import Library, find_library
from ..installed import tf

_MOST = 1024
"""Marks that are taken at once."""
_numbers = itertools.count()
_NUMBERS = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64, tf.uint8, tf.int8, tf.bool)


def mark_loss(loss: Any) -> Any:
    """Return the loss; in a graph one whose gradient marks when it was known. See [Note: a mark]."""
    if tf.executing_eagerly():
        tell(lambda watch: watch.loss_is_known(had_batch=False))
        return loss
    found: list[Any] = []
    quietly(lambda: found.append(_in_graph(loss)))
    return found[0] if found else loss


def _in_graph(loss: Any) -> Any:
    library = _library()
    batch = _first_argument(tf.compat.v1.get_default_graph())
    if library is None or batch is None or not isinstance(loss, tf.Tensor):
        return loss
    number = next(_numbers)
    with tf.device("CPU:0"):
        begun = library.clock(input=batch, after=[], call=number, place=0)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def marked(value: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            with tf.device("CPU:0"):
                known = library.clock(input=upstream, after=[value, begun], call=number, place=1)
            known.set_shape(upstream.shape)
            return known

        return tf.identity(value), gradient

    step_watch.marks.take = take_marks
    return marked(loss)


def _library() -> Library | None:
    recorded: list[bool] = []
    tell(lambda watch: recorded.append(watch.is_recorded))
    if not any(recorded) or tf.config.list_physical_devices("GPU"):
        return None
    from tensorflow.python.ops import control_flow_util

    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        return None
    return find_library()


def _first_argument(graph: Any) -> Any:
    """Return the first tensor of numbers that a function is given; None outside of functions."""
    if not graph.building_function:
        return None
    captured = {id(tensor) for tensor in graph.internal_captures}
    for operation in graph.get_operations():
        if operation.type != "Placeholder":
            break
        tensor = operation.outputs[0]
        if id(tensor) not in captured and tensor.dtype in _NUMBERS and tensor.shape.rank != 0:
            return tensor
    return None


def take_marks() -> list[Mark]:
    """Return the marks since the last call: of batches whose loss was known."""
    library = find_library()
    if library is None:
        return []
    told = (ctypes.c_int64 * (4 * _MOST))()
    count = library.clocks(told, _MOST)
    rows_of: dict[int, int] = {}
    found = []
    for i in range(count):
        number, place, nanoseconds, rows = told[4 * i : 4 * i + 4]
        if place == 0:
            rows_of[number] = rows
        else:
            found.append(Mark(None, nanoseconds * 1e-9, rows_of.pop(number, 0)))
    return found
