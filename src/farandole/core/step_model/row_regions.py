"""The memory in which ZeRO stages 1 and 2 exchange rows: regions that all buckets, or all chunks, use in turn.

One definition for the exchange, which allocates them, and for the estimate of memory, which counts them.
"""

from __future__ import annotations

CHUNK_BYTES = 4 * 2**20
"""Parameters that travel together after the optimizer's step, side by side; a larger one is alone."""
GATHER_REGIONS = 2
"""Two at least: a rank writes a region again after it has met the others at the other one."""
LARGE_REGION_BYTES = 8 * 2**20


def sum_regions(largest_bytes: int) -> int:
    """Return how many buckets of gradients are on their way at once at stage 2; the largest has so many bytes."""
    return 2 if largest_bytes > LARGE_REGION_BYTES else 3


def gather_bytes(trainable_bytes: int, largest_tensor_bytes: int) -> int:
    """Return the bytes of the regions in which parameters travel, at stages 1 and 2."""
    return GATHER_REGIONS * min(trainable_bytes, max(CHUNK_BYTES, largest_tensor_bytes))
