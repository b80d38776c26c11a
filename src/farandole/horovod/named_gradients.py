"""The gradients of one optimizer or tape, exchanged: a list goes in, a list in the same order comes out.

What is the same whatever computes them: which ones travel, in which buckets, how, and who is told of it. What a
framework does to its arrays, and how a bucket gets to the engine, is of the classes below this one.

[Note: flat] Dense gradients of one type travel side by side in buffers of the plan's `bucket_bytes`: one operation
for many gradients, and the engine sums in place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..core.vocabulary.codec_spec import NONE, CodecSpec
from ..core.vocabulary.spec import Plan
from .array_verification import find_verification
from .common.applied_plan import apply_plan, codec_of_gradient, plan_for_named, refuse_other_passes
from .common.basics import basics
from .common.reductions import Adasum, Average, reduction_of
from .exchange.layouts import FlatBucket, GradientPart, Place, layout_text, plan_buckets
from .exchange.names import key_of, label_of, without_count
from .exchange.settings import GradientSettings, group_numbers


class Sent(NamedTuple):
    """A dense gradient, as it is sent."""

    tensor: Any
    context: Any
    """What decompresses it."""
    shape: tuple[int, ...] | None
    """None: known only when the graph runs."""
    dtype: torch.dtype


class NamedGradients(ABC):
    """How the gradients of one optimizer or tape meet."""

    travel_so: str
    """Whose gradients travel so, for errors of plans."""

    def __init__(self, settings: GradientSettings, name: str) -> None:
        """`name`: the same on all ranks."""
        self.settings = settings
        self.name = name
        self.local: set[int] = set()
        """Variables, by `key_of`, whose gradients stay on this rank."""

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients of all ranks; None stays None. `variables`: whose gradients they are."""
        settings, running = self.settings, basics.running
        running.plan_is_applied = True
        plan = apply_plan(running.plan, settings.compression, settings.passes)
        results = list(gradients)
        if not settings.process_set.included() or self._is_alone():
            return results
        plan = plan_for_named(running.plan, plan, settings.op, self.travel_so)
        refuse_other_passes(running.plan, plan, settings.passes)
        travelling, kept = self._sort_out(results, variables)
        labels = [label_of(variable) for variable in variables]
        self._tell_verification(variables, labels)
        there = [i for i in range(len(results)) if i not in kept]
        layout = layout_text([self._place(without_count(labels[i]), results[i]) for i in there])
        groups = group_numbers(settings.groups, variables, key_of)
        self._begin(layout, there, has_none=not travelling)
        sent: dict[int, Sent] = {}
        for i in travelling:
            if self._is_sparse(results[i]):
                results[i] = self._exchange_sparse(results[i], layout, labels[i])
            else:
                sent[i] = self._compress(results[i], variables[i])
        parts = [self._part(i, each, labels[i], groups.get(i), plan) for i, each in sent.items()]
        buckets = plan_buckets(parts, plan.with_bucket_bytes(on_device=False).bucket_bytes)
        tensors = [[sent[part.index].tensor for part in bucket.parts] for bucket in buckets]
        names = [tuple(labels[part.index] for part in bucket.parts) for bucket in buckets]
        for bucket, shares in zip(buckets, self._exchange(buckets, tensors, layout, names), strict=True):
            for part, share in zip(bucket.parts, shares, strict=True):
                results[part.index] = settings.compression.decompress(share, sent[part.index].context)
        for i in travelling:
            self._mark(results[i])
        return results

    def _tell_verification(self, variables: Sequence[Any], labels: Sequence[str]) -> None:
        """Tell ``farandole verify``, where it looks, whose gradients are exchanged."""
        verification = find_verification(basics.running.world)
        if verification is None:
            return
        pairs = zip(labels, variables, strict=True)
        shared = [(label, each) for label, each in pairs if key_of(each) not in self.local]
        if shared:
            verification.begins(
                self.name,
                shared[0][1],
                lambda: [(label, self._read(each)) for label, each in shared],
                is_eager=self._is_eager(),
                ranks=self.settings.process_set.size() or 1,
            )

    def _sort_out(self, results: list[Any], variables: Sequence[Any]) -> tuple[list[int], set[int]]:
        """Return the places of the gradients that travel, and of those that stay, which are scaled."""
        travelling: list[int] = []
        kept: set[int] = set()
        for i, (gradient, variable) in enumerate(zip(results, variables, strict=True)):
            if key_of(variable) in self.local:
                kept.add(i)
                if self.settings.scale_local_gradients and gradient is not None:
                    results[i] = self._scaled(gradient)
            elif gradient is not None and self._is_exchanged(gradient):
                kept.add(i)
            elif gradient is not None:
                travelling.append(i)
        return travelling, kept

    def _part(self, index: int, sent: Sent, label: str, group: int | None, plan: Plan) -> GradientPart:
        name, itemsize = str(sent.dtype), sent.dtype.itemsize
        if sent.shape is None:
            return GradientPart(index, (), name, itemsize, alone=True)
        alone, codec = self.settings.op == Adasum, NONE
        if plan.codec != NONE or plan.codec_for:
            codec = codec_of_gradient(label, torch.empty(sent.shape, dtype=sent.dtype, device="meta"), plan)
            alone = alone or CodecSpec.parse(codec).is_low_rank
        return GradientPart(index, sent.shape, name, itemsize, codec, alone, group)

    def _operation(self) -> dict[str, Any]:
        """Return how an operation reduces."""
        factor = self.settings.predivide_factor if self.settings.op == Average else 1.0
        return {"reduction": reduction_of(self.settings.op), "prescale": 1.0 / factor, "postscale": factor}

    # -- what a framework does itself ------------------------------------------------------------

    @abstractmethod
    def _is_alone(self) -> bool:
        """Return whether nothing travels: one rank, and no more to come while this is used."""

    @abstractmethod
    def _place(self, label: str, gradient: Any) -> Place:
        """Return what ranks compare of a gradient; it may be None."""

    @abstractmethod
    def _compress(self, gradient: Any, variable: Any) -> Sent:
        """Return a dense gradient as it is sent."""

    @abstractmethod
    def _begin(self, layout: str, there: Sequence[int], *, has_none: bool) -> None:
        """Begin an exchange of the gradients `there`. `has_none`: this rank sends nothing, and others may."""

    @abstractmethod
    def _exchange(
        self, buckets: Sequence[FlatBucket], tensors: Sequence[Any], layout: str, names: Sequence[tuple[str, ...]]
    ) -> list[list[Any]]:
        """Return for each bucket the tensors of all ranks, each in its shape. `names`: those of the variables."""

    @abstractmethod
    def _scaled(self, gradient: Any) -> Any:
        """Return a gradient over the number of ranks."""

    @abstractmethod
    def _read(self, variable: Any) -> Any:
        """Return the value of a variable, an array of NumPy."""

    def _is_eager(self) -> bool:
        return True

    def _is_sparse(self, gradient: Any) -> bool:
        return False

    def _exchange_sparse(self, gradient: Any, layout: str, label: str) -> Any:
        """Return the rows of all ranks."""
        raise NotImplementedError

    def _is_exchanged(self, gradient: Any) -> bool:
        """Return whether a gradient is that of all ranks already."""
        return False

    def _mark(self, gradient: Any) -> None:  # noqa: B027 - nothing is right where nothing looks at it
        """Note that a gradient is that of all ranks."""
