"""Gradients that are sparse and travel as dense ones: made dense when they are ready, sparse again afterwards.

Their optimizer sees what it would see without other ranks: `SparseAdam` takes no dense gradients, and others
make no step for rows that no rank used. As in Horovod they are sparse from ``synchronize()`` on.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ....comm.gradients.grad_ownership import replace_grad


class SparseAsDense:
    """Which gradients of one optimizer are sparse on this rank."""

    def __init__(self, parameters: Iterable[torch.Tensor], *, all_are_sparse: bool) -> None:
        """`all_are_sparse`: the optimizer takes no others, so those that this rank did not touch are, too."""
        self._dimensions: dict[torch.Tensor, int] = dict.fromkeys(parameters, 1) if all_are_sparse else {}
        """How many of the first dimensions a parameter's sparse gradient has indices for."""

    def make_dense(self, parameter: torch.Tensor) -> None:
        """Make a gradient dense, and remember that it was not."""
        if parameter.grad is not None and parameter.grad.is_sparse:
            self._dimensions[parameter] = parameter.grad.sparse_dim()
            replace_grad(parameter, parameter.grad.to_dense())

    @torch.no_grad()
    def make_sparse_again(self) -> None:
        """Make those sparse that were; rows of zeros are left out."""
        for parameter, dimensions in self._dimensions.items():
            grad = parameter.grad
            if grad is not None and not grad.is_sparse:
                replace_grad(parameter, grad.to_sparse(dimensions))
