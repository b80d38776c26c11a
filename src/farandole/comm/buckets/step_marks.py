"""How ranks notice in a sum that they have made different numbers of steps. See [Note: one step off]."""

from __future__ import annotations

from functools import cache

import torch

_BITS = 4
MARKS = 2 * _BITS
"""Elements that say how many steps were made."""


@cache
def _pattern(steps: int) -> torch.Tensor:
    bits = [float(steps >> i & 1) for i in range(_BITS)]
    return torch.tensor([each for bit in bits for each in (bit, 1.0 - bit)], dtype=torch.float32)


def marks_of(steps: int) -> torch.Tensor:
    """Return this rank's marks for a number of steps: (MARKS,), float32."""
    return _pattern(steps % 2**_BITS)


def marks_differ(summed: torch.Tensor) -> bool:
    """Return whether the ranks whose marks were added up have made different numbers of steps."""
    sums = (summed.real if summed.is_complex() else summed).tolist()
    return any(sums[i] > 0 and sums[i + 1] > 0 for i in range(0, MARKS, 2))
