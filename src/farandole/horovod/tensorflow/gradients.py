"""How the gradients of TensorFlow meet. In a graph a bucket travels as soon as its gradients are there.

[Note: numbered alike] The operations of one exchange are numbered in one row, whatever they are, and the first one
is number 0 on all ranks. So ranks that differ in their gradients, one sparse where another is dense, one without
any, meet in an operation of one name, which is an error, and do not wait for each other. See `exchange.layouts`.

[Note: twice] A tape and an optimizer in one step would exchange the same gradients twice: with Average that is not
seen, with Sum they grow by the number of ranks. So results are marked, and marked ones are left as they are.
"""

from __future__ import annotations

import ctypes
import itertools
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

from ...core.env import read_elastic_settings
from ...core.vocabulary.codec_spec import NONE
from ..common.operations import set_number
from ..common.reductions import Adasum, Sum
from ..exchange import step_watch
from ..exchange.layouts import FlatBucket, Place, layouts
from ..exchange.settings import GradientSettings
from ..exchange.step_watch import Mark, Round, quietly, tell
from ..named_gradients import NamedGradients, Sent
from .errors import translated
from .installed import tf
from .ops.call import Library, OperationCall, find_library, torch_type
from .ops.inputs import size_of
from .ops.run import name_here, run_plain

_MARK = "_farandole_exchanged"
"""An attribute of tensors."""


class FlatExchange(NamedGradients):
    """How the gradients of one optimizer or tape meet."""

    travel_so = "TensorFlow's travel so"

    def __init__(self, settings: GradientSettings, name: str) -> None:
        super().__init__(settings, name)
        self._round = Round(name, one_by_one=False, front_end="tensorflow")
        """That of the exchange that is being made."""
        self._numbers: Iterator[int] = itertools.count()
        """See [Note: numbered alike]."""
        self._warned = False

    def _is_alone(self) -> bool:
        return self.settings.process_set.size() == 1 and read_elastic_settings() is None

    def _read(self, variable: Any) -> Any:
        return np.asarray(tf.convert_to_tensor(variable).numpy())

    def _is_eager(self) -> bool:
        return bool(tf.executing_eagerly())

    def _place(self, label: str, gradient: Any) -> Place:
        if gradient is None:
            return Place(label, (), "")
        if isinstance(gradient, tf.IndexedSlices):
            return Place(label, tuple(gradient.values.shape[1:].as_list()), f"sparse {gradient.dtype.name}")
        shape = gradient.shape
        return Place(label, tuple(shape) if shape.is_fully_defined() else (), gradient.dtype.name)

    def _begin(self, layout: str, there: Sequence[int], *, has_none: bool) -> None:
        """Compare the layout now, also while a graph is made, where no operation could have it as a part."""
        one_by_one = self._is_eager() or find_library() is None
        self._round = Round(name_here(self.name), one_by_one=one_by_one, front_end="tensorflow")
        self._numbers = itertools.count()
        if has_none and there:
            with translated("HorovodAllreduce"):
                number = set_number(self.settings.process_set, "Allreduce")
                layouts.compare_now(f"allreduce.{self._next_name()}", layout, number, again=self._is_eager())

    def _next_name(self) -> str:
        return f"{self._round.name}.{next(self._numbers)}"

    def _compress(self, gradient: Any, variable: Any) -> Sent:
        tensor = tf.convert_to_tensor(gradient)
        shape = tensor.shape
        if not shape.is_fully_defined() and hasattr(variable, "shape"):
            known = tf.TensorShape(variable.shape)
            if known.is_fully_defined():
                tensor, shape = tf.ensure_shape(tensor, known), known
        sent, context = self.settings.compression.compress(tensor)
        return Sent(sent, context, tuple(shape) if shape.is_fully_defined() else None, torch_type(sent.dtype))

    def _exchange(
        self, buckets: Sequence[FlatBucket], tensors: Sequence[Any], layout: str, names: Sequence[tuple[str, ...]]
    ) -> list[list[Any]]:
        found = [
            self._exchange_bucket(bucket, own, layout, labels)
            for bucket, own, labels in zip(buckets, tensors, names, strict=True)
        ]
        self._round.all_added()
        return found

    def _exchange_bucket(
        self, bucket: FlatBucket, tensors: Sequence[Any], layout: str, labels: tuple[str, ...]
    ) -> list[Any]:
        if bucket.is_whole:
            return run_plain(self._call(bucket, layout, labels, consumes=False), tensors)
        pieces = []
        for part, tensor in zip(bucket.parts, tensors, strict=True):
            pieces.append(tf.reshape(tensor, [-1]))
            if part.padded > part.elements:
                pieces.append(tf.zeros([part.padded - part.elements], tensor.dtype))
        # A buffer of one piece may be the gradient itself, which others may use.
        flat = tf.concat(pieces, 0) if len(pieces) > 1 else pieces[0]
        (flat,) = run_plain(self._call(bucket, layout, labels, consumes=len(pieces) > 1), [flat])
        shares = tf.split(flat, bucket.sizes) if len(bucket.parts) > 1 else [flat]
        return [
            tf.reshape(share if part.padded == part.elements else share[: part.elements], part.shape)
            for part, share in zip(bucket.parts, shares, strict=True)
        ]

    def _call(self, bucket: FlatBucket, layout: str, labels: tuple[str, ...], *, consumes: bool) -> OperationCall:
        return OperationCall(
            "allreduce",
            self.settings.process_set,
            own_name=f"allreduce.{self._next_name()}",
            codec=bucket.codec,
            chosen_with=self._round.name,
            consumes=consumes,
            layout=layout,
            part=self._round.add(bucket.nbytes, bucket.codec, labels),
            **self._operation(),
        )

    def _is_sparse(self, gradient: Any) -> bool:
        return isinstance(gradient, tf.IndexedSlices) and not self.settings.sparse_as_dense

    def _exchange_sparse(self, gradient: Any, layout: str, label: str) -> Any:
        """Return the rows of all ranks; rows that several have are added up, as optimizers expect."""
        if self.settings.op == Adasum:
            raise NotImplementedError(
                "The Adasum reduction does not currently support sparse tensors. As a workaround please pass "
                "sparse_as_dense=True to DistributedOptimizer"
            )
        name = f"allreduce.{self._next_name()}"
        values = self._rows(name, gradient.values, layout, label)
        indices = self._rows(f"{name}.indices", gradient.indices, layout, label)
        if self.settings.op != Sum:
            values = values / tf.cast(size_of(self.settings.process_set), values.dtype)
        rows, where = tf.unique(indices)
        total = tf.math.unsorted_segment_sum(values, where, tf.size(rows))
        return tf.IndexedSlices(total, rows, dense_shape=gradient.dense_shape)

    def _rows(self, name: str, tensor: Any, layout: str, label: str) -> Any:
        part = self._round.add(0, NONE, (label,))
        call = OperationCall("allgather", self.settings.process_set, own_name=name, layout=layout, part=part)
        return run_plain(call, [tensor])[0]

    def _scaled(self, gradient: Any) -> Any:
        size = tf.cast(size_of(self.settings.process_set), gradient.dtype)
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(gradient.values / size, gradient.indices, dense_shape=gradient.dense_shape)
        return gradient / size

    def _is_exchanged(self, gradient: Any) -> bool:
        """See [Note: twice]."""
        is_marked = getattr(gradient, _MARK, False)
        if is_marked and not self._warned:
            self._warned = True
            warnings.warn(
                "farandole: these gradients were exchanged already, by a DistributedGradientTape or another "
                "DistributedOptimizer: they are used as they are; use one of both",
                RuntimeWarning,
                stacklevel=4,
            )
        return is_marked

    def _mark(self, gradient: Any) -> None:
        try:
            setattr(gradient, _MARK, True)
        except AttributeError:  # a kind of tensor that takes no attributes
            return


# Marks in a graph: when a batch was there, its rows, and when its loss was known. For the records.
#
# [Note: a mark] An operation of ours in C++ that reads the clock and the number of rows of its input, and keeps
# both until Python asks at the end of the batch. It runs when its input is there. The first one takes the batch,
# and all of the step that uses the batch waits for it: otherwise TensorFlow would run it long after, with few
# threads. The second one takes the loss; its gradient passes through it, and backward begins after it. TensorFlow
# drops what nothing takes its data from, so part of the batch, and that gradient, are what comes out of them. A
# third one tells when the graph began that asks for the batch: to call it takes TensorFlow longer than to fetch a
# small batch. Values stay the same. Where there is no such operation (without a compiler, on a machine with a GPU,
# in an XLA program) nothing is marked.


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
