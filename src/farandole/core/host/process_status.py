"""What the kernel says of a process: memory that is resident, what it does with signals, CPU time beside others'.

And what this one may have: open files, memory; its heap, and which of its pages were written.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import fcntl
import mmap
import os
import platform
import resource
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..env import allocator_is_tuned
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
        machine = 0.0
        with contextlib.suppress(OSError, ValueError, IndexError):
            words = (_PROC / "stat").read_text(encoding="ascii").splitlines()[0].split()
            # User, nice, system, and what a hypervisor took; interrupts belong to no program.
            machine = sum(int(words[at]) for at in (1, 2, 3, 8)) / os.sysconf("SC_CLK_TCK")
        return cls(machine_name(), os.cpu_count() or 1, time.monotonic(), machine, own)

    def since(self, before: CoreTime) -> CoreTime:
        """Return the differences to an earlier moment."""
        return CoreTime(
            self.boot, self.cores, self.at_seconds - before.at_seconds,
            self.machine_seconds - before.machine_seconds, self.own_seconds - before.own_seconds,
        )  # fmt: skip


def machine_name(*spaces: str) -> str:
    """Return what is alike for processes of one running kernel that share these namespaces; empty: not known.

    `spaces`: such as "pid", "net" and "time".
    """
    with contextlib.suppress(OSError):
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return " ".join([boot, *(str((_PROC / "self/ns" / each).readlink()) for each in spaces)])
    return ""


def interface_bytes(process: int | str = "self") -> dict[str, tuple[int, int]]:
    """Return (sent, received) bytes by interface, in the network namespace of `process`. Raises `OSError`."""
    found = {}
    for line in (_PROC / str(process) / "net/dev").read_text(encoding="ascii").splitlines()[2:]:
        name, _, numbers = line.partition(":")
        words = numbers.split()
        found[name.strip()] = int(words[8]), int(words[0])
    return found


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


# The heap of this process: memory that was freed, and that the C library keeps or gives back.
#
# [Note: freed memory stays] Glibc returns the top of its heap to the kernel whenever enough of it is free, and
# takes it back a moment later, each page with a fault. A training step frees and takes the same activations and
# gradients over and over, so `fd.init` lets glibc keep them. Large blocks lie in the heap then, where freed ones
# leave gaps: at ZeRO stage 3, whose parameters come and go with each block, a rank held 1.12 to 1.19 GB where it
# needs 0.77 (docs/fit/memory.md), and its step took 2.3 s instead of 3.8. A plan or a limit that asks for less
# memory gets it at that price.


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


# Which pages of this process's memory were written since a moment: asked of the kernel, which misses no write.
#
# All writes are seen: those of Python, a library, another thread, a system call. This needs Linux 6.7 and
# permission for ``userfaultfd``, which some containers refuse: `PageWatch` raises `OSError` then. Only private
# memory without a file can be watched: other processes write to the rest without this one's pages. Memory that a
# device writes to by itself (pinned memory) must not be watched either: the CPU's page tables do not see that.


PAGE_BYTES = mmap.PAGESIZE
_SYSTEM_CALL = {"x86_64": 323, "aarch64": 282}
_USER_MODE_ONLY = 1
_API = 0xAA
_FEATURES = 1 << 0 | 1 << 13 | 1 << 15
"""Faults of writes; pages that are not there yet; and the kernel goes on by itself after a first write."""
_SET_API, _REGISTER, _UNREGISTER, _PROTECT = 0xC018AA3F, 0xC020AA00, 0x8010AA01, 0xC018AA06
_MODE_WRITES = 2
_SCAN = 0xC0606610
_REFUSE_UNWATCHED = 2
_WRITTEN, _PRESENT, _SWAPPED = 1 << 1, 1 << 3, 1 << 4


class PageWatch:
    """Watches ranges of this process's memory for writes. Ranges are addresses of whole pages."""

    def __init__(self) -> None:
        """Raise `OSError` where the kernel cannot, or does not let this process."""
        number = _SYSTEM_CALL.get(platform.machine())
        if number is None:
            raise OSError(f"no number of userfaultfd is known for {platform.machine()}")
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.syscall(number, os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "userfaultfd")
        try:
            fcntl.ioctl(self._descriptor, _SET_API, bytearray(struct.pack("QQQ", _API, _FEATURES, 0)))
            self._pages = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            os.close(self._descriptor)
            raise

    def add(self, begin: int, end: int) -> None:
        """Watch a range from now on. Raises `OSError` for memory that cannot be watched."""
        fcntl.ioctl(
            self._descriptor, _REGISTER, bytearray(struct.pack("QQQQ", begin, end - begin, _MODE_WRITES, 0))
        )
        try:
            fcntl.ioctl(self._descriptor, _PROTECT, bytearray(struct.pack("QQQ", begin, end - begin, 1)))
        except OSError:
            self.remove(begin, end)
            raise

    def was_written(self, begin: int, end: int) -> bool:
        """Return whether a page of a watched range was written, or given back to the kernel, since `add`."""
        found = (ctypes.c_uint64 * 3)()
        size, regions, no_limit = 96, 1, 0
        # Pages that were not written, and are there or were swapped out: one region of them, if all are such.
        numbers = (size, _REFUSE_UNWATCHED, begin, end, 0, ctypes.addressof(found), regions, no_limit)
        categories = (_WRITTEN, _WRITTEN, _PRESENT | _SWAPPED, _WRITTEN)
        request = bytearray(struct.pack("12Q", *numbers, *categories))
        try:
            count = fcntl.ioctl(self._pages, _SCAN, request)
        except OSError:  # it is no watched memory any more
            return True
        return count != 1 or (found[0], found[1]) != (begin, end)

    def remove(self, begin: int, end: int) -> None:
        """Watch a range no more: writes cost nothing from now on."""
        try:
            fcntl.ioctl(self._descriptor, _UNREGISTER, bytearray(struct.pack("QQ", begin, end - begin)))
        except OSError:
            return  # it is no memory any more

    def close(self) -> None:
        """Watch nothing any more. May be called twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
            os.close(self._pages)


class PrivateMemory:
    """The ranges of this process's memory that no file and no other process has, at the moment of making."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
            where, rights, _, _, inode = line.split(None, 5)[:5]
            if inode != "0" or rights[:2] != "rw" or rights[3] != "p":
                continue
            begin, end = (int(number, 16) for number in where.split("-"))
            if self._ends and self._ends[-1] == begin:
                self._ends[-1] = end
            else:
                self._begins.append(begin)
                self._ends.append(end)

    def has(self, begin: int, end: int) -> bool:
        """Return whether all of a range is such memory."""
        index = bisect.bisect_right(self._begins, begin) - 1
        return index >= 0 and end <= self._ends[index]
