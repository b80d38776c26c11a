"""The heap of this process: memory that was freed and that the C library still holds."""

from __future__ import annotations

import ctypes
from typing import Any

_trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)


def trim_heap() -> None:
    """Give freed memory back to the system, where the C library is glibc."""
    if _trim is not None:
        _trim(0)
