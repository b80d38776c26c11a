"""What the kernel says of a process: memory that is resident, what it does with signals, CPU time beside others'.

And what this one may have: open files, memory.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..vocabulary.units import format_bytes

_PROC = Path("/proc")
_KIB = 1024
_MOST_FILES = 1 << 20
"""What kernels allow by default. A program that closes all it may have open, one by one, needs 0.2 s for them."""


_BUSY_SHARE = 0.1
"""The share of a machine's cores from which what other programs take is worth a word."""


@dataclass(frozen=True)
class CoreTime:
    """CPU seconds of a machine since it started, and of this process with its children that have ended."""

    boot: str
    """The kernel's boot id, which tells machines apart; empty: not known."""
    cores: int
    at_seconds: float
    machine_seconds: float
    own_seconds: float

    @classmethod
    def now(cls) -> CoreTime:
        """Return this moment."""
        own = sum(
            usage.ru_utime + usage.ru_stime
            for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        )
        machine, boot = 0.0, ""
        with contextlib.suppress(OSError, ValueError, IndexError):
            words = (_PROC / "stat").read_text(encoding="ascii").splitlines()[0].split()
            # User, nice, system, and what a hypervisor took; interrupts belong to no program.
            machine = sum(int(words[at]) for at in (1, 2, 3, 8)) / os.sysconf("SC_CLK_TCK")
            boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return cls(boot, os.cpu_count() or 1, time.monotonic(), machine, own)

    def since(self, before: CoreTime) -> CoreTime:
        """Return the differences to an earlier moment."""
        return CoreTime(
            self.boot, self.cores, self.at_seconds - before.at_seconds,
            self.machine_seconds - before.machine_seconds, self.own_seconds - before.own_seconds,
        )  # fmt: skip


def busy_machines(spans: Sequence[CoreTime]) -> str:
    """Return what other programs took of the machines' cores meanwhile, in words; empty: little, or not known.

    `spans`: of all processes that were at work, each with `CoreTime.since`.
    """
    found = []
    for boot in dict.fromkeys(span.boot for span in spans if span.boot):
        own = [span for span in spans if span.boot == boot]
        seconds = max(1e-9, *(span.at_seconds for span in own))
        others = (max(span.machine_seconds for span in own) - sum(span.own_seconds for span in own)) / seconds
        if others > _BUSY_SHARE * own[0].cores:
            found.append(f"{min(others, own[0].cores):.1f} of {own[0].cores} cores")
    where = " and ".join([", ".join(found[:-1]), found[-1]] if len(found) > 1 else found)
    return f"other programs took {where} meanwhile: an idle machine gives more" if found else ""


def resident_bytes() -> int | None:
    """Return what is resident of this process now; None where the system does not say."""
    return _own_bytes("VmRSS:")


def peak_resident_bytes() -> int | None:
    """Return the most that was resident since the process began, or its peak was cleared; None: not known."""
    return _own_bytes("VmHWM:")


def catches(process: int, number: int) -> bool:
    """Return whether a process has a handler of its own for a signal; False for one that is gone."""
    return _is_in("SigCgt:", process, number)


def ignores(process: int, number: int) -> bool:
    """Return whether a process ignores a signal; False for one that is gone."""
    return _is_in("SigIgn:", process, number)


def raise_descriptor_limit() -> None:
    """Let this process have as many files open as it may; do nothing where that is refused.

    Gloo's listeners never let go of a connection that a stranger closed, and abort the process at the limit. The
    usual soft limit of 1,024 is for programs that call `select`, which takes no higher number. What a rank starts
    inherits ours: such a program fails at its 1,025th file in `select`, and would have failed to open it before.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def memory_limit() -> str:
    """Return the least limit of this process's own memory, such as ``1.3 GB (RLIMIT_DATA)``; "" for none."""
    limits = _limits()
    name = min(limits, key=lambda each: limits[each], default="")
    return f"{format_bytes(limits[name])} ({name})" if name else ""


def is_short_of_memory() -> bool:
    """Return whether this process may have less memory than the machine has."""
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return any(limit < machine_bytes for limit in _limits().values())


def _limits() -> dict[str, int]:
    found = {name: resource.getrlimit(getattr(resource, name))[0] for name in ("RLIMIT_DATA", "RLIMIT_AS")}
    return {name: limit for name, limit in found.items() if limit != resource.RLIM_INFINITY}


def data_bytes() -> int | None:
    """Return what RLIMIT_DATA counts of this process now; None where the system does not say."""
    return _own_bytes("VmData:")


def _own_bytes(field: str) -> int | None:
    with contextlib.suppress(ValueError):
        return int(_read("self", field)) * _KIB
    return None


def _is_in(field: str, process: int, number: int) -> bool:
    return bool(int(_read(process, field) or "0", 16) >> (number - 1) & 1)


def _read(process: int | str, field: str) -> str:
    """Return the first word of a field; nothing where there is none."""
    with contextlib.suppress(OSError, IndexError):
        text = (_PROC / str(process) / "status").read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            if line.startswith(field):
                return line.split()[1]
    return ""
