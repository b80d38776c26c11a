"""Memory, limits, cores and GPUs of this host, as the kernel, its control group and the GPUs' driver say."""

from __future__ import annotations

import resource
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..job.placement import available_cores
from .facts import Gpu

_CGROUP = Path("/sys/fs/cgroup")
_GPU_SECONDS = 12.0
"""A driver that no program keeps loaded takes seconds for each GPU."""
_MORE_PATH = "/usr/sbin:/sbin"
"""Where programs for the network are; not on the PATH of every user."""


def read_memory(cgroup: Path = _CGROUP) -> dict[str, int | None]:
    """Return the memory of this host, or of its control group where that has less."""
    import psutil  # not above: commands that ask for no memory start in milliseconds

    try:
        memory = psutil.virtual_memory()
    except (OSError, ValueError, LookupError):  # no /proc/meminfo, or a strange one
        return {"memory_bytes": None, "memory_available_bytes": None}
    total, available = memory.total, memory.available
    limit, used = _memory_limit(cgroup)
    if limit is not None and used is not None and limit < total:
        total, available = limit, max(0, min(available, limit - used))
    return {"memory_bytes": total, "memory_available_bytes": available}


def _memory_limit(cgroup: Path) -> tuple[int | None, int | None]:
    """Return limit and use of the control group: version 2, or 1. Files that are only cached are not used."""
    for limit, used, stat in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        with suppress(OSError, ValueError):
            found = int((cgroup / limit).read_text()), int((cgroup / used).read_text())
            return found[0], max(0, found[1] - _cached_bytes(cgroup / stat))
    return None, None


def _cached_bytes(stat: Path) -> int:
    with suppress(OSError, ValueError):
        words = stat.read_text().split()
        return int(words[words.index("inactive_file") + 1])
    return 0


def read_shared_memory(place: str = "/dev/shm") -> dict[str, int]:
    """Return the size of /dev/shm, 0 where there is none."""
    total = free = 0
    with suppress(OSError):
        total, _, free = shutil.disk_usage(place)
    return {"shared_memory_bytes": total, "shared_memory_free_bytes": free}


def read_limits() -> dict[str, int | None]:
    """Return the soft limits of open files and locked memory, None for none."""

    def soft(limit: int) -> int | None:
        value = resource.getrlimit(limit)[0]
        return None if value == resource.RLIM_INFINITY else value

    return {"open_files": soft(resource.RLIMIT_NOFILE), "locked_memory_bytes": soft(resource.RLIMIT_MEMLOCK)}


def read_cores(cgroup: Path = _CGROUP) -> dict[str, int | float | None]:
    """Return how many cores processes may run on, and what share of them their control group allows."""
    return {"cores": len(available_cores()), "core_quota": _core_quota(cgroup)}


def _core_quota(cgroup: Path) -> float | None:
    with suppress(OSError, ValueError):
        quota, period = (cgroup / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError, ZeroDivisionError):
        wanted = int((cgroup / "cpu/cpu.cfs_quota_us").read_text())
        return None if wanted <= 0 else wanted / int((cgroup / "cpu/cpu.cfs_period_us").read_text())
    return None


def read_gpus() -> dict[str, Any]:
    """Return the GPUs that nvidia-smi, a part of the driver, tells of."""
    query = "--query-gpu=name,memory.total,memory.used,driver_version"
    text = ask_command("nvidia-smi", [query, "--format=csv,noheader,nounits"], _GPU_SECONDS)
    if text is None:
        return {"gpus": (), "gpu_source": ""}
    return {"gpus": parse_nvidia_smi(text), "gpu_source": "nvidia-smi"}


def ask_command(name: str, words: Sequence[str], seconds: float) -> str | None:
    """Return what a command prints; None where it is missing, fails or takes longer than `seconds`."""
    command = shutil.which(name) or shutil.which(name, path=_MORE_PATH)
    if command is None:
        return None
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        return subprocess.run(
            [command, *words],
            capture_output=True, text=True, timeout=seconds, check=True, stdin=subprocess.DEVNULL,
        ).stdout  # fmt: skip
    return None


def parse_nvidia_smi(text: str) -> tuple[Gpu, ...]:
    """Read lines of name, total and used MiB, driver; ``[N/A]`` is unknown."""
    found = []
    for line in text.splitlines():
        words = [word.strip() for word in line.rsplit(",", 3)]
        if len(words) == 4:
            found.append(Gpu(words[0], _mebibytes(words[1]), _mebibytes(words[2]), words[3]))
    return tuple(found)


def _mebibytes(text: str) -> int | None:
    return int(text) * 2**20 if text.isascii() and text.isdecimal() else None
