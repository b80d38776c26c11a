"""Memory that is used in turn: by rows that ZeRO stages 1 and 2 exchange, and by states that lie on a disk.

One definition for what allocates it, and for the estimate of memory, which counts it.
"""

from __future__ import annotations

CHUNK_BYTES = 4 * 2**20
"""Parameters that travel together after the optimizer's step, side by side; a larger one is alone."""
GATHER_REGIONS = 2
"""Two at least: a rank writes a region again after it has met the others at the other one."""
LARGE_REGION_BYTES = 8 * 2**20
STATE_CHUNK_BYTES = 16 * 2**20
"""States of a file that are in use at once, or those of one parameter."""


def sum_regions(largest_bytes: int) -> int:
    """Return how many buckets of gradients are on their way at once at stage 2; the largest has so many bytes."""
    return 2 if largest_bytes > LARGE_REGION_BYTES else 3


def gather_bytes(trainable_bytes: int, largest_tensor_bytes: int) -> int:
    """Return the bytes of the regions in which parameters travel, at stages 1 and 2."""
    return GATHER_REGIONS * min(trainable_bytes, max(CHUNK_BYTES, largest_tensor_bytes))


def disk_state_bytes(state_bytes: float, largest_bytes: float) -> int:
    """Return what states on a disk take of memory: the chunk in use and the next one.

    Args:
        state_bytes: of all of a rank's states.
        largest_bytes: of those of its largest parameter.
    """
    return round(min(state_bytes, 2 * max(STATE_CHUNK_BYTES, largest_bytes)))
