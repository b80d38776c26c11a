"""The gradients of one optimizer or tape, exchanged: a list goes in, a list in the same order comes out.

[Note: flat] Dense gradients of one type travel side by side in buffers of the plan's `bucket_bytes`: one operation
for many gradients, and the engine sums in place. In a graph a bucket travels as soon as its gradients are there.

[Note: numbered alike] The operations of one exchange are numbered in one row, whatever they are, and the first one
is number 0 on all ranks. So ranks that differ in their gradients, one sparse where another is dense, one without
any, meet in an operation of one name, which is an error, and do not wait for each other. See `exchange.layouts`.

[Note: twice] A tape and an optimizer in one step would exchange the same gradients twice: with Average that is not
seen, with Sum they grow by the number of ranks. So results are marked, and marked ones are left as they are.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....core.environ.env import read_elastic_settings
from ....core.vocabulary.codec_spec import NONE, CodecSpec
from ....core.vocabulary.spec import Plan
from ...common.applied_plan import apply_plan, codec_of_gradient, plan_for_named, refuse_other_passes
from ...common.basics import basics
from ...common.operations import set_number
from ...common.reductions import Adasum, Average, Sum, reduction_of
from ...exchange.buckets import FlatBucket, GradientPart, plan_buckets
from ...exchange.layouts import Place, layout_text, layouts
from ...exchange.names import key_of
from ...exchange.rounds import Round
from ...exchange.settings import GradientSettings, group_numbers
from ...verify.observed import observe
from ..calls.call import OperationCall
from ..calls.graph import name_here
from ..calls.library import find_library
from ..calls.run import run_plain
from ..calls.tensors import torch_type
from ..errors import translated
from ..functions import label_of, without_count
from ..installed import tf
from ..ops.inputs import size_of
from .observed import read, tell

_MARK = "_farandole_exchanged"
"""An attribute of tensors."""


@dataclass
class _Dense:
    """A dense gradient, as it is sent."""

    tensor: Any
    context: Any
    shape: tuple[int, ...] | None
    """None: known only when the graph runs."""


class FlatExchange:
    """How the gradients of one optimizer or tape meet. `name`: the same on all ranks."""

    def __init__(self, settings: GradientSettings, name: str) -> None:
        self.settings = settings
        self.name = name
        self.local: set[int] = set()
        """Variables, by `key_of`, whose gradients stay on this rank."""
        self._round = Round(name, one_by_one=False, front_end="tensorflow")
        """That of the exchange that is being made."""
        self._warned = False

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients of all ranks; None stays None. `variables`: whose gradients they are."""
        settings = self.settings
        running = basics.running
        running.plan_is_applied = True
        plan = apply_plan(running.plan, settings.compression, settings.passes)
        results = list(gradients)
        if not settings.process_set.included():
            return results
        if settings.process_set.size() == 1 and read_elastic_settings() is None:
            return results
        plan = plan_for_named(running.plan, plan, settings.op, "TensorFlow's travel so")
        refuse_other_passes(running.plan, plan, settings.passes)
        travelling, kept = self._sort_out(results, variables)
        labels = [label_of(variable) for variable in variables]
        eager = tf.executing_eagerly()
        observed = observe(running, self.name, variables, labels, settings, plan, is_eager=eager, read=read)
        own = list(results)
        if observed is not None and observed.is_replay:
            tell(observed, travelling, own, own)
            return own
        layout = layout_text(
            [_place(without_count(labels[i]), results[i]) for i in range(len(results)) if i not in kept]
        )
        name = name_here(self.name)
        self._round = _make_round(name)
        groups = group_numbers(settings.groups, variables, key_of)
        if not travelling and len(kept) < len(results):
            self._compare_nothing(f"{name}.0", layout)
        dense = {}
        numbers = itertools.count()  # see [Note: numbered alike]
        for i in travelling:
            if isinstance(results[i], tf.IndexedSlices) and not settings.sparse_as_dense:
                results[i] = self._sparse(f"{name}.{next(numbers)}", results[i], layout, labels[i])
            else:
                dense[i] = self._compress(tf.convert_to_tensor(results[i]), variables[i])
        parts = [self._part(i, each, labels[i], groups.get(i), plan) for i, each in dense.items()]
        for bucket in plan_buckets(parts, plan.bucket_bytes):
            tensors = [dense[part.index].tensor for part in bucket.parts]
            names = tuple(labels[part.index] for part in bucket.parts)
            travelled = self._travel(f"{name}.{next(numbers)}", bucket, tensors, layout, names)
            for part, result in zip(bucket.parts, travelled, strict=True):
                results[part.index] = settings.compression.decompress(result, dense[part.index].context)
        self._round.all_added()
        if observed is not None:
            tell(observed, travelling, own, results)
        for i in travelling:
            _mark(results[i])
        return results

    def _compare_nothing(self, name: str, layout: str) -> None:
        """Compare the layout where this rank has no gradient to send: other ranks may have some, and would wait.

        In a graph now, while it is made: there is no operation of which it could be a part.
        """
        with translated("HorovodAllreduce"):
            number = set_number(self.settings.process_set, "Allreduce")
            layouts.compare_now(f"allreduce.{name}", layout, number, again=bool(tf.executing_eagerly()))

    def _sort_out(self, results: list[Any], variables: Sequence[Any]) -> tuple[list[int], set[int]]:
        """Return the places of the gradients that travel, and of those that stay, which are scaled."""
        settings = self.settings
        travelling: list[int] = []
        kept: set[int] = set()
        for i, (gradient, variable) in enumerate(zip(results, variables, strict=True)):
            if key_of(variable) in self.local:
                kept.add(i)
                if settings.scale_local_gradients and gradient is not None:
                    results[i] = _scaled(gradient, size_of(settings.process_set))
            elif gradient is not None and not getattr(gradient, _MARK, False):
                travelling.append(i)
            elif gradient is not None:
                kept.add(i)
                self._warn_of_second_exchange()
        return travelling, kept

    def _warn_of_second_exchange(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                "farandole: these gradients were exchanged already, by a DistributedGradientTape or another "
                "DistributedOptimizer: they are used as they are; use one of both",
                RuntimeWarning,
                stacklevel=4,
            )

    def _compress(self, tensor: Any, variable: Any) -> _Dense:
        shape = tensor.shape
        if not shape.is_fully_defined() and hasattr(variable, "shape"):
            known = tf.TensorShape(variable.shape)
            if known.is_fully_defined():
                tensor, shape = tf.ensure_shape(tensor, known), known
        sent, context = self.settings.compression.compress(tensor)
        return _Dense(sent, context, tuple(shape) if shape.is_fully_defined() else None)

    def _part(self, index: int, dense: _Dense, label: str, group: int | None, plan: Plan) -> GradientPart:
        kind = torch_type(dense.tensor.dtype)
        if dense.shape is None:
            return GradientPart(index, (), dense.tensor.dtype.name, kind.itemsize, alone=True)
        alone, codec = self.settings.op == Adasum, NONE
        if plan.codec != NONE or plan.codec_for:
            codec = codec_of_gradient(label, torch.empty(dense.shape, dtype=kind, device="meta"), plan)
            alone = alone or CodecSpec.parse(codec).is_low_rank
        return GradientPart(index, dense.shape, dense.tensor.dtype.name, kind.itemsize, codec, alone, group)

    def _travel(
        self, name: str, bucket: FlatBucket, tensors: Sequence[Any], layout: str, labels: tuple[str, ...]
    ) -> list[Any]:
        """Return the gradients of one bucket, of all ranks. `labels`: of their variables."""
        if bucket.is_whole:
            return run_plain(self._call(name, bucket, layout, labels, consumes=False), tensors)
        pieces = []
        for part, tensor in zip(bucket.parts, tensors, strict=True):
            pieces.append(tf.reshape(tensor, [-1]))
            if part.padded > part.elements:
                pieces.append(tf.zeros([part.padded - part.elements], tensor.dtype))
        # A buffer of one piece may be the gradient itself, which others may use.
        flat = tf.concat(pieces, 0) if len(pieces) > 1 else pieces[0]
        (flat,) = run_plain(self._call(name, bucket, layout, labels, consumes=len(pieces) > 1), [flat])
        shares = tf.split(flat, bucket.sizes) if len(bucket.parts) > 1 else [flat]
        return [
            tf.reshape(share if part.padded == part.elements else share[: part.elements], part.shape)
            for part, share in zip(bucket.parts, shares, strict=True)
        ]

    def _call(
        self, name: str, bucket: FlatBucket, layout: str, labels: tuple[str, ...], *, consumes: bool
    ) -> OperationCall:
        settings = self.settings
        factor = settings.predivide_factor if settings.op == Average else 1.0
        return OperationCall(
            "allreduce",
            settings.process_set,
            own_name=f"allreduce.{name}",
            reduction=reduction_of(settings.op),
            prescale=1.0 / factor,
            postscale=factor,
            codec=bucket.codec,
            chosen_with=self._round.name,
            consumes=consumes,
            layout=layout,
            part=self._round.add(bucket.nbytes, bucket.codec, labels),
        )

    def _sparse(self, name: str, slices: Any, layout: str, label: str) -> Any:
        """Return the rows of all ranks; rows that several have are added up, as optimizers expect."""
        settings = self.settings
        if settings.op == Adasum:
            raise NotImplementedError(
                "The Adasum reduction does not currently support sparse tensors. As a workaround please pass "
                "sparse_as_dense=True to DistributedOptimizer"
            )
        values = self._rows(f"allreduce.{name}", slices.values, layout, label)
        indices = self._rows(f"allreduce.{name}.indices", slices.indices, layout, label)
        if settings.op != Sum:
            values = values / tf.cast(size_of(settings.process_set), values.dtype)
        rows, where = tf.unique(indices)
        total = tf.math.unsorted_segment_sum(values, where, tf.size(rows))
        return tf.IndexedSlices(total, rows, dense_shape=slices.dense_shape)

    def _rows(self, name: str, tensor: Any, layout: str, label: str) -> Any:
        part = self._round.add(0, NONE, (label,))
        call = OperationCall("allgather", self.settings.process_set, own_name=name, layout=layout, part=part)
        return run_plain(call, [tensor])[0]


def _make_round(name: str) -> Round:
    one_by_one = tf.executing_eagerly() or find_library() is None
    return Round(name, one_by_one=one_by_one, front_end="tensorflow")


def _place(label: str, gradient: Any) -> Place:
    if gradient is None:
        return Place(label, (), "")
    if isinstance(gradient, tf.IndexedSlices):
        return Place(label, tuple(gradient.values.shape[1:].as_list()), f"sparse {gradient.dtype.name}")
    shape = gradient.shape
    return Place(label, tuple(shape) if shape.is_fully_defined() else (), gradient.dtype.name)


def _scaled(gradient: Any, size: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        scaled = gradient.values / tf.cast(size, gradient.values.dtype)
        return tf.IndexedSlices(scaled, gradient.indices, dense_shape=gradient.dense_shape)
    return gradient / tf.cast(size, gradient.dtype)


def _mark(gradient: Any) -> None:
    try:
        setattr(gradient, _MARK, True)
    except AttributeError:  # a kind of tensor that takes no attributes
        return
