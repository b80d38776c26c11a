"""Sums of squares of gradients: what a norm is made of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor


@torch.no_grad()
def square_sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the squares of all elements, a tensor () of float64; nothing is waited for.

    Each tensor is added up in float32 (float64 if it is of that), so narrow floats lose nothing.
    """
    full = [tensor for tensor in tensors if tensor.numel()]
    if not full:
        return torch.zeros((), dtype=torch.float64)
    wide = torch.float64 if full[0].dtype in (torch.float64, torch.complex128) else torch.float32
    norms = torch._foreach_norm(full, 2, dtype=wide) if not full[0].is_complex() else torch._foreach_norm(full, 2)
    return torch.stack(list(norms)).to(torch.float64).square().sum()


def count_nonzero_gradients(parameters: Sequence[torch.Tensor], most: int) -> int:
    """Return how many of `parameters` have a gradient that is not zero, at most `most`; reads those there are."""
    found = 0
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        found += bool((local.coalesce()._values() if local.is_sparse else local).any())
        if found >= most:
            break
    return found
