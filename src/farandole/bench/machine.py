"""What a measurement was made on: facts of this machine, versions and commit, without torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from datetime import datetime
from pathlib import Path
from typing import Any

from ..core.host.installed import working_directory_commit
from ..core.host.open_sockets import congestion_control
from ..version import VERSION

_CPUINFO = Path("/proc/cpuinfo")


def machine_facts() -> dict[str, Any]:
    """Return CPU, cores, memory, system, versions, the working directory's commit, and the load now."""
    versions = {"farandole": VERSION, "python": platform.python_version()}
    for package in ("torch", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "when": datetime.now().astimezone().isoformat(timespec="seconds"),
        "processor": _named("model name", _CPUINFO) or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "congestion_control": congestion_control(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load": [round(load, 2) for load in os.getloadavg()],
        "versions": versions,
        "commit": working_directory_commit(),
    }


def machine_line(facts: dict[str, Any]) -> str:
    """Return the facts in a sentence."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return (
        f"{facts['when']}. {facts['cores']} cores of {facts['processor']},"
        f" {facts['memory_bytes'] / 2**30:.0f} GiB, {facts['system']}; {versions};"
        f" commit {facts['commit'] or 'unknown'}; load {facts['load'][0]} when it began."
    )


def busy_note(facts: dict[str, Any]) -> str | None:
    """Return a warning where others keep the machine busy."""
    load = facts["load"][0]
    if load <= 0.3 * (facts["cores"] or 1):
        return None
    return f"the machine was busy before it began (load {load} on {facts['cores']} cores): times are not its best"


def has_16_bits(cpuinfo: Path = _CPUINFO) -> bool:
    """Return whether the CPU computes in 16 bits at a speed worth it; True where it does not say.

    On x86 it takes AVX-512 or AVX-NE-CONVERT: without them, matrix products are made by plain loops.
    """
    flags = _named("flags", cpuinfo).split()
    return not flags or any(flag.startswith(("avx512", "avx10", "avx_ne_convert")) for flag in flags)


def _named(name: str, cpuinfo: Path) -> str:
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((text.partition(":")[2].strip() for text in lines if text.startswith(name)), "")
