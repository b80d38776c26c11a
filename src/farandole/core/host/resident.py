"""Memory of this process that is in RAM, now and at most; None where the system does not say."""

from __future__ import annotations

import contextlib
from pathlib import Path

_STATUS = Path("/proc/self/status")
_KIB = 1024


def resident_bytes() -> int | None:
    """Return what is resident now."""
    return _read("VmRSS:")


def peak_resident_bytes() -> int | None:
    """Return the most that was resident since the process began, or since its peak was cleared."""
    return _read("VmHWM:")


def _read(field: str) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in _STATUS.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * _KIB
    return None
