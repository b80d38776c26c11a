"""The sparse gradient of one embedding: indices and rows travel, never the whole table."""

from __future__ import annotations

import torch

from ..collectives.backend import start_all_reduce
from ..gradients.grad_ownership import replace_grad
from ..routes.route import Route
from .bucket import Waitable


class SparseBucket:
    """A `Bucket` of one parameter whose gradient is sparse."""

    def __init__(self, members: list[int], parameter: torch.nn.Parameter, size: int) -> None:
        """`size`: ranks that take part."""
        self.members = members
        self.pending = 0
        self.nbytes = self.sent_bytes = 0
        self._parameter = parameter
        self._size = size
        self._sum: torch.Tensor

    @property
    def is_held(self) -> bool:
        """See `Bucket`."""
        grad = self._parameter.grad
        if grad is None or not grad.is_sparse:
            return False
        return bool(grad._values().data_ptr() == self._sum._values().data_ptr())

    def note_used(self) -> None:
        """See `Bucket`."""

    def holds_used(self, index: int) -> bool:
        """See `Bucket`."""
        return self.is_held

    @property
    def is_finite(self) -> bool:
        """See `Bucket`."""
        return bool(torch.isfinite(self._sum._values()).all())

    @torch.no_grad()
    def load(self, weight: float) -> None:
        """See `Bucket`. A weight of 0 contributes no rows."""
        grad = self._parameter.grad
        if grad is None or weight == 0.0:
            parameter = self._parameter
            grad = torch.sparse_coo_tensor(
                torch.empty((1, 0), dtype=torch.int64, device=parameter.device),
                torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device),
                parameter.shape,
                check_invariants=False,
            )
        self._sum = (grad * weight).coalesce() if weight != 0.0 else grad.coalesce()
        values = self._sum._values()
        row_bytes = values.element_size() * max(1, values[:1].numel()) + 8
        self.sent_bytes = (self._size - 1) * values.shape[0] * row_bytes

    def add(self, position: int, tensor: torch.Tensor, factor: float) -> None:
        """See `Bucket`."""
        raise AssertionError("nothing is carried over to a sparse gradient")

    def launch(self, route: Route) -> Waitable:
        """See `Bucket`."""
        return start_all_reduce(self._sum, route.group)

    def finalize(self) -> None:
        """See `Bucket`. Rows that no rank touched stay away; a gradient of no row at all is None."""
        replace_grad(self._parameter, self._sum if self._sum._nnz() else None)

    def zero_missing_grads(self) -> None:
        """See `Bucket`."""

    def mark_steps(self, steps: int | None) -> None:
        """See `Bucket`. Nothing but rows travels."""

    @property
    def steps_differ(self) -> bool:
        """See `Bucket`."""
        return False
