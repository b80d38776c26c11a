"""How the gradients of TensorFlow meet. In a graph a bucket travels as soon as its gradients are there.

[Note: numbered alike] The operations of one exchange are numbered in one row, whatever they are, and the first one
is number 0 on all ranks. So ranks that differ in their gradients, one sparse where another is dense, one without
any, meet in an operation of one name, which is an error, and do not wait for each other. See `exchange.layouts`.

[Note: twice] A tape and an optimizer in one step would exchange the same gradients twice: with Average that is not
seen, with Sum they grow by the number of ranks. So results are marked, and marked ones are left as they are.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ....core.environ.env import read_elastic_settings
from ....core.vocabulary.codec_spec import NONE
from ...common.operations import set_number
from ...common.reductions import Adasum, Sum
from ...exchange.buckets import FlatBucket
from ...exchange.layouts import Place, layouts
from ...exchange.rounds import Round
from ...exchange.settings import GradientSettings
from ...named_gradients import NamedGradients, Sent
from ..calls.call import OperationCall
from ..calls.graph import name_here
from ..calls.library import find_library
from ..calls.run import run_plain
from ..calls.tensors import torch_type
from ..errors import translated
from ..installed import tf
from ..ops.inputs import size_of

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
