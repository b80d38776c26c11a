"""The heap of this process: memory that was freed, and that the C library keeps or gives back.

[Note: freed memory stays] Glibc returns the top of its heap to the kernel whenever enough of it is free, and takes
it back a moment later, each page with a fault. A training step frees and takes the same activations and gradients
over and over, so `fd.init` lets glibc keep them. Large blocks lie in the heap then, where freed ones leave gaps:
at ZeRO stage 3, whose parameters come and go with each block, a rank held 1.12 to 1.20 GB where it needs 0.75, and
its step took 2.3 s instead of 3.7 (docs/memory.md). A plan or a limit that asks for less memory gets it at that
price.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from ..environ.env import allocator_is_tuned
from .process_status import is_short_of_memory

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
"""The numbers of these options in mallopt(3)."""
_KEPT = {M_MMAP_THRESHOLD: 2**30, M_TRIM_THRESHOLD: 2**31 - 1}
_GIVEN_BACK = {M_MMAP_THRESHOLD: 2**20, M_TRIM_THRESHOLD: 2**20}
_glibc: Any = ctypes.CDLL(None)


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory, for fewer page faults in each step; return whether it does.

    It gives it back where a limit (RLIMIT_DATA, RLIMIT_AS) is below the machine's memory. Left alone where there
    is no glibc, and where the user has tuned the allocator by its variables.
    """
    if is_short_of_memory():
        give_back_freed_memory()
        return False
    return _set(_KEPT)


def give_back_freed_memory() -> None:
    """Let glibc give freed memory back to the system, unless the user has tuned the allocator by its variables."""
    _set(_GIVEN_BACK)
    trim_heap()


def trim_heap() -> None:
    """Give freed memory back to the system now, where the C library is glibc."""
    if (trim := getattr(_glibc, "malloc_trim", None)) is not None:
        trim(0)


def _set(options: dict[int, int]) -> bool:
    if not sys.platform.startswith("linux") or allocator_is_tuned() or not hasattr(_glibc, "mallopt"):
        return False
    return all(_glibc.mallopt(number, value) for number, value in options.items())
