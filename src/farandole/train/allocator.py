"""Keeping freed memory in the process: fewer page faults in every step.

[Note: freed memory stays] Glibc returns the top of its heap to the kernel whenever enough of it is free,
and takes it back a moment later, each page with a fault. A training step frees and takes the same
activations and gradients over and over; keeping them saves about 2 % of a step of the demo's model. It
costs resident memory, because large blocks lie in the heap, where freed ones leave gaps: 204 MB where
154 MB are in use, in a training whose gradients take 67 MB (docs/results/foundation.md, route flat).
"""

from __future__ import annotations

import ctypes
import sys

from ..core.environ.env import allocator_is_tuned

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
KEEP_BYTES = 2**31 - 1
LARGEST_FROM_HEAP_BYTES = 2**30


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory; return whether it was told.

    Left alone where there is no glibc, and where the user has tuned the allocator by its variables.
    """
    if not sys.platform.startswith("linux") or allocator_is_tuned():
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mapped = mallopt(M_MMAP_THRESHOLD, LARGEST_FROM_HEAP_BYTES)
    return bool(mallopt(M_TRIM_THRESHOLD, KEEP_BYTES)) and bool(mapped)
