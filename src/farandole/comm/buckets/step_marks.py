"""How ranks notice in a sum that they have made different numbers of steps. See [Note: one step off]."""

from __future__ import annotations

from functools import cache

import torch

from ..device.streams import HostCopy

_BITS = 4
MARKS = 2 * _BITS
"""Elements that say how many steps were made."""


@cache
def _patterns(device: torch.device) -> torch.Tensor:
    """Return the marks of all numbers of steps, made once on each device: (2**_BITS, MARKS)."""
    bits = [[float(steps >> i & 1) for i in range(_BITS)] for steps in range(2**_BITS)]
    rows = [[each for bit in row for each in (bit, 1.0 - bit)] for row in bits]
    return torch.tensor(rows, dtype=torch.float32, device=device)


def marks_of(steps: int, device: torch.device) -> torch.Tensor:
    """Return this rank's marks for a number of steps: (MARKS,), float32."""
    return _patterns(device)[steps % 2**_BITS]


def marks_differ(summed: torch.Tensor) -> bool:
    """Return whether the ranks whose marks were added up have made different numbers of steps."""
    sums = (summed.real if summed.is_complex() else summed).tolist()
    return any(sums[i] > 0 and sums[i + 1] > 0 for i in range(0, MARKS, 2))


class LateMarks:
    """Summed marks on their way from a device to the host."""

    def __init__(self, summed: HostCopy) -> None:
        self._summed = summed

    @property
    def has_arrived(self) -> bool:
        """See `LateSteps`."""
        return self._summed.has_arrived

    @property
    def differ(self) -> bool:
        """Whether the ranks have made different numbers of steps."""
        return marks_differ(self._summed.read())
