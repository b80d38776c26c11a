"""The reducer path: gradients lie in buckets that travel while backward runs. See `gradient_exchange`.

[Note: exactly one exchange] Between two calls of ``synchronize`` (or ``step``, which calls it) every rank takes
part in exactly one exchange: at the end of its backward pass, or, when that touched none of the optimizer's
parameters, in ``synchronize``. A parameter without a gradient contributes zeros, and gets the mean of the others.

[Note: gradients that are not used] A ``GradScaler`` skips a step whose gradients hold infinity. They are the same
on all ranks, so all skip, and the next ``zero_grad`` or backward pass is no mistake: only then are gradients read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from ....comm.reducer.options import ReducerOptions
from ....comm.reducer.reducer import GradientReducer
from ....comm.world.store_sync import require_same
from ....comm.world.world import World
from ....core.vocabulary.errors import CommError
from ....core.vocabulary.spec import Plan
from ....observe.export.operation_timeline import BucketTimeline
from ...common.basics import basics
from ...common.exceptions import from_comm_error
from ...common.reductions import Sum
from .applied_plan import plan_for_reducer
from .joining import announce_connection, serve_while_joined
from .optimizer_names import TOO_MANY
from .sparse_as_dense import SparseAsDense


def refuses(parameters: Sequence[torch.Tensor]) -> str:
    """Return why the reducer cannot take these; empty when it can."""
    for parameter in parameters:
        if not parameter.dtype.is_floating_point:
            return f"a parameter is {str(parameter.dtype).removeprefix('torch.')}"
        if parameter.device.type not in ("cpu", "cuda"):
            return f"a parameter is on {parameter.device}"
    return ""


class GradientPath:
    """A `gradient_exchange.Path` over one `GradientReducer`."""

    def __init__(
        self,
        here: World,
        named: Sequence[tuple[str, Any]],
        settings: Any,
        plan: Plan,
    ) -> None:
        self.world = here
        self._parameters = [parameter for _, parameter in named]
        self.name = _name_path(here, named)
        self.is_connected = False
        self._sparse = SparseAsDense(self._parameters, all_are_sparse=settings.all_are_sparse)
        # Before the reducer's hooks, which then see dense gradients.
        self._own_hooks = [
            parameter.register_post_accumulate_grad_hook(self._sparse.make_dense)
            for parameter in self._parameters
            if settings.sparse_as_dense and parameter.requires_grad
        ]
        self.reducer = GradientReducer(
            here,
            named,
            plan_for_reducer(plan, settings.compression, self._parameters, here),
            ReducerOptions(
                lazy_init=True,
                before_connecting=self._before_connecting,
                reduce_op="sum" if settings.op == Sum else "mean",
                include_frozen=True,
                on_second_gradient=self._on_second_gradient,
                map_error=from_comm_error,
            ),
        )
        self.reducer.watch(BucketTimeline(basics.running.log, lambda: self.reducer.names_by_bucket))
        self._taken = 0
        serve_while_joined(self)

    @property
    def _arrived(self) -> bool:
        return self.reducer.exchanges_done > self._taken

    @property
    def pending(self) -> bool:
        """See `Path`."""
        return self._arrived or self.reducer.passes_held > 0

    @property
    def handles(self) -> dict[Any, tuple[Any, Any]]:
        """See `Path`. The reducer has no handles to show."""
        return {p: (None, None) for p in self._parameters if p.requires_grad} if self.pending else {}

    def passes_due(self) -> dict[torch.Tensor, int]:
        """See `Path`."""
        due = 0 if self._arrived else self.reducer.accumulate - self.reducer.passes_held
        return {parameter: due for parameter in self._parameters if parameter.requires_grad}

    def synchronize(self) -> None:
        """See `Path`."""
        try:
            if not self._arrived:
                self.reducer.exchange()
        except CommError as problem:
            raise from_comm_error(problem) from problem
        self.reset()
        if not self.reducer.step_is_skipped:
            self.reducer.zero_missing_grads()
        self._sparse.make_sparse_again()

    def may_zero(self) -> bool:
        """See `Path` and [Note: gradients that are not used]."""
        if not self.pending:
            return True
        if not self._arrived or self.reducer.mean_is_finite:
            return False
        self.reset()
        return True

    def set_passes(self, passes: int) -> None:
        """See `Path`."""
        self.reducer.begin_step(accumulate=passes)

    def reset(self) -> None:
        """See `Path`."""
        self._taken = self.reducer.exchanges_done
        self.reducer.begin_step()

    def close(self) -> None:
        """See `Path`."""
        for hook in self._own_hooks:
            hook.remove()
        self.reducer.remove()

    # -- while this rank has joined; see `joining` --------------------------------------------

    def _before_connecting(self) -> None:
        self.is_connected = True
        announce_connection(self)
        keys = self.reducer.plan.to_mapping().items()
        require_same(self.world, "comparing plans", [(f"plan key {key!r}", value) for key, value in keys])

    @property
    def is_open(self) -> bool:
        """Whether gradients still meet."""
        return self.reducer.is_open

    @property
    def exchanges_done(self) -> int:
        """How many exchanges all ranks took part in."""
        return self.reducer.exchanges_done

    def exchange_nothing(self) -> None:
        """Take part in the other ranks' next exchange, with zeros."""
        self.reducer.exchange(contribute=False)

    def _on_second_gradient(self, name: str) -> Exception | None:
        return None if self.may_zero() else AssertionError(f"{TOO_MANY} (parameter {name!r})")


def _name_path(here: World, named: Sequence[tuple[str, torch.Tensor]]) -> str:
    """Return a name that is the same on all ranks, whatever the order in which they made their optimizers."""
    text = repr([(name, tuple(parameter.shape), str(parameter.dtype)) for name, parameter in named])
    return here.topic(f"gradients {hashlib.sha256(text.encode()).hexdigest()[:16]}")
