"""The elements of a user's tensor side by side, and their bytes, however it lies in memory."""

from __future__ import annotations

import torch


def side_by_side(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements, (elements,) with stride 1: a view where that is possible.

    A column of a row, or ``x[::2]`` of two elements, has one element and a stride of more than 1. Torch calls it
    contiguous, and refuses to view it as bytes.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat if flat.stride() == (1,) else flat.as_strided(flat.shape, (1,))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements' bytes in their order, (bytes,) of uint8: a view where that is possible."""
    return side_by_side(tensor).view(torch.uint8)
