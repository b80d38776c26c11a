"""Which cores a rank gets: an equal, contiguous share of those this process may use."""

from __future__ import annotations

import os


def available_cores() -> list[int]:
    """Return the cores this process may run on."""
    return sorted(os.sched_getaffinity(0))


def divide_cores(cores: list[int], ranks: int) -> list[tuple[int, ...]]:
    """Divide `cores` evenly over `ranks`; empty shares (no binding) when there are too few.

    >>> divide_cores([0, 1, 2, 3, 4], 2)
    [(0, 1), (2, 3)]
    """
    each = len(cores) // ranks
    return [tuple(cores[rank * each : (rank + 1) * each]) for rank in range(ranks)]
