"""Marks in a graph: when a batch was there, its rows, and when its loss was known. For the records.

[Note: a mark] An operation of ours in C++ that reads the clock and the number of rows of its input, and keeps both
until Python asks at the end of the batch. It runs when its input is there. The first one takes the batch, and all
of the step that uses the batch waits for it: otherwise TensorFlow would run it long after, with few threads. The
second one takes the loss; its gradient passes through it, and backward begins after it. TensorFlow drops what
nothing takes its data from, so part of the batch, and that gradient, are what comes out of them. A third one tells
when the graph began that asks for the batch: to call it takes TensorFlow longer than to fetch a small batch.
Values stay the same. Where there is no such operation (without a compiler, on a machine with a GPU, in an XLA
program) nothing is marked.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import deque
from functools import cache
from typing import Any

from ...exchange import step_watch
from ...exchange.batch_phases import Mark
from ...exchange.step_watch import quietly, tell
from ..calls.library import Library, find_library
from ..installed import tf

_MOST = 1024
"""Marks that are taken at once."""
_numbers = itertools.count()
_NUMBERS = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64, tf.uint8, tf.int8, tf.bool)
_BATCH, _LOSS, _BEGIN = 0, 1, 2
"""Places of marks."""
_NAME = "_farandole_mark"
"""An attribute of graphs: the number of the mark of their batch."""


def mark_batch(data: Any, *, is_only: bool) -> Any:
    """Return a batch; for the records one that marks when it was there. See [Note: a mark].

    `is_only`: whether the graph asks for one batch.
    """
    found: list[Any] = []
    quietly(lambda: found.append(_marked_batch(data, is_only=is_only)))
    return found[0] if found else data


def _marked_batch(data: Any, *, is_only: bool) -> Any:
    leaves = tf.nest.flatten(data, expand_composites=True)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, tf.Tensor)]
    rows_of = [place for place in places if leaves[place].dtype in _NUMBERS and leaves[place].shape.rank != 0]
    batch = leaves[rows_of[0]] if rows_of else None
    if tf.executing_eagerly():
        rows = 0 if batch is None else int(batch.shape[0])
        tell(lambda watch: watch.batch_is_there(rows))
        return data
    tell(lambda watch: watch.traces())
    library, graph = _library(), tf.compat.v1.get_default_graph()
    if library is None or batch is None or not graph.building_function:
        return data
    number = next(_numbers)
    setattr(graph, _NAME, number)
    after = [leaves[place] for place in places]
    if is_only:
        after.append(_mark_begin(library, graph, number))
    with tf.device("CPU:0"):
        there = library.clock(input=batch, after=after, call=number, place=_BATCH)
    there.set_shape(batch.shape)
    with tf.control_dependencies([there]):
        for place in places:
            leaves[place] = there if place == rows_of[0] else tf.identity(leaves[place])
    step_watch.marks.take = take_marks
    return tf.nest.pack_sequence_as(data, leaves, expand_composites=True)


def _mark_begin(library: Library, graph: Any, number: int) -> Any:
    """Return what marks when the graph begins that asks for the batch: Keras 3 has one around that of the step."""
    outer = graph.outer_graph if getattr(graph.outer_graph, "building_function", False) else graph
    with outer.as_default(), tf.device("CPU:0"):
        # A variable, as what depends on constants alone would be computed when the graph is made.
        return library.clock(input=tf.identity(_nothing()), after=[], call=number, place=_BEGIN)


@cache
def _nothing() -> Any:
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(0.0, trainable=False, name="farandole_nothing")


def mark_loss(loss: Any) -> Any:
    """Return the loss; in a graph one whose gradient marks when it was known. See [Note: a mark]."""
    if tf.executing_eagerly():
        tell(lambda watch: watch.loss_is_known(had_batch=False))
        return loss
    found: list[Any] = []
    quietly(lambda: found.append(_marked_loss(loss)))
    return found[0] if found else loss


def _marked_loss(loss: Any) -> Any:
    library, graph = _library(), tf.compat.v1.get_default_graph()
    number = getattr(graph, _NAME, None)
    if library is None or number is None or not isinstance(loss, tf.Tensor):
        return loss

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def marked(value: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            with tf.device("CPU:0"):
                known = library.clock(input=upstream, after=[value], call=number, place=_LOSS)
            known.set_shape(upstream.shape)
            return known

        return tf.identity(value), gradient

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


def take_marks() -> list[Mark]:
    """Return the marks since the last call, by batch."""
    library = find_library()
    if library is None:
        return []
    told = (ctypes.c_int64 * (4 * _MOST))()
    count = library.clocks(told, _MOST)
    found: list[Mark] = []
    waiting: dict[int, deque[int]] = {}
    """Places in `found` of batches whose loss is not known, by the number of their graph."""
    begun: dict[int, float] = {}
    for i in range(count):
        number, place, nanoseconds, rows = told[4 * i : 4 * i + 4]
        own = waiting.setdefault(number, deque())
        if place == _BEGIN:
            begun[number] = nanoseconds * 1e-9
        elif place == _BATCH:
            own.append(len(found))
            found.append(Mark(nanoseconds * 1e-9, None, rows, begun.pop(number, None)))
        elif own:  # the oldest: batches of one graph have their losses in order
            first = own.popleft()
            found[first] = found[first]._replace(loss_seconds=nanoseconds * 1e-9)
    return found
