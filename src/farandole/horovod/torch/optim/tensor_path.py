"""The tensor path: every gradient, or group of gradients, is one operation that ranks match by name.

For what the reducer cannot do; see `gradient_exchange`. An operation is launched when its gradients are ready, and
``synchronize`` launches what is missing (with zeros for a parameter without a gradient) and waits for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ....comm.gradients.grad_ownership import replace_grad, zero_missing_grads
from ....core.vocabulary.codec_spec import NONE
from ....core.vocabulary.spec import Plan
from ...common.applied_plan import codec_of_gradient
from ...common.compression import CodecCompressor, codec_of
from ...common.reductions import Average
from ..ops.allreduce import ReduceOptions, begin_allreduce
from ..ops.handles import synchronize, wait_for_all
from ..ops.sparse import sparse_allreduce_async
from .optimizer_names import TOO_MANY
from .sparse_as_dense import SparseAsDense

Members = tuple[torch.Tensor, ...]
"""Parameters that travel as one; most are alone."""


class TensorPath:
    """A `gradient_exchange.Path` over named operations."""

    def __init__(self, named: Sequence[tuple[str, Any]], settings: Any, plan: Plan) -> None:
        self._settings = settings
        self._passes = passes = plan.accumulate
        self._names = {parameter: name for name, parameter in named}
        by_name = dict(named)
        self._members: dict[torch.Tensor, Members] = {parameter: (parameter,) for _, parameter in named}
        for group in settings.groups:
            members = tuple(by_name[name] for name in group if name in by_name)
            self._members.update(dict.fromkeys(members, members))
        wanted = settings.all_are_sparse
        self._sparse = SparseAsDense([parameter for _, parameter in named], all_are_sparse=wanted)
        self._codecs = {
            parameter: _codec(name, parameter, settings.compression, plan) for name, parameter in named
        }
        self._due = dict.fromkeys(self._names, passes)
        """How many backward passes each gradient still waits for."""
        self._on_their_way: dict[Members, Callable[[], None]] = {}
        """For each operation, what waits for it and puts the results into the gradients."""
        self._hooks = [p.register_post_accumulate_grad_hook(self._ready) for _, p in named]

    @property
    def pending(self) -> bool:
        """See `Path`."""
        return bool(self._on_their_way) or any(due < self._passes for due in self._due.values())

    @property
    def handles(self) -> dict[Any, tuple[Any, Any]]:
        """See `Path`: the function that waits, or None for gradients that are not complete."""
        begun = [p for p, due in self._due.items() if due < self._passes]
        keys = {members if len(members) > 1 else members[0] for members in self._on_their_way}
        waiting: dict[Any, tuple[Any, Any]] = {p: (None, None) for p in begun if self._members[p] not in keys}
        waiting.update(
            (members if len(members) > 1 else members[0], (wait, None))
            for members, wait in self._on_their_way.items()
        )
        return waiting

    def passes_due(self) -> dict[torch.Tensor, int]:
        """See `Path`."""
        return dict(self._due)

    def synchronize(self) -> None:
        """See `Path`."""
        try:
            for members in sorted(set(self._members.values()), key=lambda group: self._names[group[0]]):
                if members not in self._on_their_way:
                    self._launch(members)
            wait_for_all(self._on_their_way.values())
            if self._settings.sparse_as_dense:
                self._sparse.make_sparse_again()
        finally:
            self._restart()

    def may_zero(self) -> bool:
        """See `Path`."""
        return not self.pending

    def set_passes(self, passes: int) -> None:
        """See `Path`."""
        self._passes = passes
        self._due = dict.fromkeys(self._names, passes)

    def reset(self) -> None:
        """See `Path`. What is on its way must arrive first: it writes into the gradients."""
        try:
            wait_for_all(self._on_their_way.values())
        finally:
            self._restart()

    def close(self) -> None:
        """See `Path`."""
        for hook in self._hooks:
            hook.remove()
        self._restart()

    def _restart(self) -> None:
        self._on_their_way = {}
        self._due = dict.fromkeys(self._names, self._passes)

    def _ready(self, parameter: torch.Tensor) -> None:
        if self._due[parameter] <= 0:
            raise AssertionError(f"{TOO_MANY} (parameter {self._names[parameter]!r})")
        self._due[parameter] -= 1
        members = self._members[parameter]
        if all(self._due[member] == 0 for member in members):
            self._launch(members)

    @torch.no_grad()
    def _launch(self, members: Members) -> None:
        grouped = len(members) > 1
        zero_missing_grads(members)
        for parameter in members:
            grad = parameter.grad
            if grad is not None and grad.is_sparse and (grouped or self._settings.sparse_as_dense):
                self._sparse.make_dense(parameter)
        first = members[0]
        if first.grad is not None and first.grad.is_sparse:
            self._on_their_way[members] = self._launch_sparse(first, first.grad)
        else:
            self._on_their_way[members] = self._launch_dense(members)

    def _launch_dense(self, members: Members) -> Callable[[], None]:
        settings = self._settings
        compression = settings.compression
        grads = [parameter.grad for parameter in members if parameter.grad is not None]
        small, contexts = zip(*[compression.compress(grad.contiguous()) for grad in grads], strict=True)
        factor = settings.predivide_factor if settings.op == Average else 1.0
        options = ReduceOptions(settings.op, 1.0 / factor, factor, settings.process_set)
        handle = begin_allreduce(
            small,
            [f"allreduce.{self._names[parameter]}" for parameter in members],
            options,
            codecs=[self._codecs[parameter] for parameter in members],
            in_place=True,
            grouped=True,
            chosen_with="gradients",
        )

        def wait() -> None:
            totals = synchronize(handle)
            with torch.no_grad():
                for grad, total, context in zip(grads, totals, contexts, strict=True):
                    result = compression.decompress(total, context)
                    if result is not grad:
                        grad.copy_(result)

        return wait

    def _launch_sparse(self, parameter: torch.Tensor, grad: torch.Tensor) -> Callable[[], None]:
        settings = self._settings
        handle = sparse_allreduce_async(
            grad.coalesce(), self._names[parameter], settings.op, process_set=settings.process_set
        )

        def wait() -> None:
            replace_grad(parameter, handle().coalesce())

        return wait


def _codec(name: str, parameter: torch.nn.Parameter, compression: Any, plan: Plan) -> str:
    """Return how the gradient of a parameter travels; what a compressor has made small travels as it is."""
    by_compressor = codec_of(compression) in (None, "fp16", "bf16") and not isinstance(
        compression, CodecCompressor
    )
    return NONE if by_compressor else codec_of_gradient(name, parameter, plan)
