"""The sparse gradient of one embedding: indices and rows travel, never the whole table."""

from __future__ import annotations

import torch

from ..collectives.backend import start_all_reduce
from ..gradients.grad_ownership import replace_grad
from ..gradients.squares import square_sum
from ..routes.route import Route
from .bucket import Bucket, Waitable


class SparseGradient:
    """The gradient of `parameter`, which is the sum that arrived or the user's own. A `Gradients`."""

    nbytes = 0

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self.parameter = parameter
        self.sum: torch.Tensor

    @property
    def is_held(self) -> bool:
        """See `Gradients`."""
        grad = self.parameter.grad
        if grad is None or not grad.is_sparse:
            return False
        return bool(grad._values().data_ptr() == self.sum._values().data_ptr())

    @property
    def is_finite(self) -> bool:
        """See `Gradients`."""
        return bool(torch.isfinite(self.sum._values()).all())

    def holds_used(self, position: int) -> bool:
        """See `Gradients`."""
        return self.is_held

    def note_used(self) -> None:
        """See `Gradients`."""

    def zero_missing(self) -> None:
        """See `Gradients`."""


class SparseBucket(Bucket):
    """A `Bucket` of one parameter whose gradient is sparse. Nothing but rows travels."""

    is_sparse = True

    def __init__(self, members: list[int], parameter: torch.nn.Parameter, size: int) -> None:
        """`size`: ranks that take part."""
        self.members, self.pending = members, 0
        self.gradients: SparseGradient = SparseGradient(parameter)
        self._size, self._sent_bytes = size, 0

    @property
    def sent_bytes(self) -> int:
        """See `Bucket`."""
        return self._sent_bytes

    @torch.no_grad()
    def load(self, weight: float) -> None:
        """See `Bucket`. A weight of 0 contributes no rows."""
        grad = self.gradients.parameter.grad
        if grad is None or weight == 0.0:
            parameter = self.gradients.parameter
            grad = torch.sparse_coo_tensor(
                torch.empty((1, 0), dtype=torch.int64, device=parameter.device),
                torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device),
                parameter.shape,
                check_invariants=False,
            )
        self.gradients.sum = (grad * weight).coalesce() if weight != 0.0 else grad.coalesce()
        values = self.gradients.sum._values()
        row_bytes = values.element_size() * max(1, values[:1].numel()) + 8
        self._sent_bytes = (self._size - 1) * values.shape[0] * row_bytes

    def add(self, position: int, tensor: torch.Tensor, factor: float) -> None:
        """See `Bucket`."""
        raise AssertionError("nothing is carried over to a sparse gradient")

    def launch(self, route: Route) -> Waitable:
        """See `Bucket`."""
        return start_all_reduce(self.gradients.sum, route.group)

    def own_square(self) -> torch.Tensor:
        """See `Bucket`."""
        return square_sum([self.gradients.sum._values()])

    def mean_square(self, rank: int, size: int) -> torch.Tensor:
        """See `Bucket`. All ranks have the same rows: the first takes them."""
        return square_sum([self.gradients.sum.coalesce()._values()] if rank == 0 else [])

    def finalize(self) -> None:
        """See `Bucket`. Rows that no rank touched stay away; a gradient of no row at all is None."""
        replace_grad(self.gradients.parameter, self.gradients.sum if self.gradients.sum._nnz() else None)
