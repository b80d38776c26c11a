"""Which pages of this process's memory were written since a moment: asked of the kernel, which misses no write.

All writes are seen: those of Python, a library, another thread, a system call. This needs Linux 6.7 and
permission for ``userfaultfd``, which some containers refuse: `PageWatch` raises `OSError` then. Only private
memory without a file can be watched: other processes write to the rest without this one's pages. Memory that a
device writes to by itself (pinned memory) must not be watched either: the CPU's page tables do not see that.

::

    watch = PageWatch()
    watch.add(begin, end)           # whole pages
    ...
    watch.was_written(begin, end)
    watch.remove(begin, end)
    watch.close()
"""

from __future__ import annotations

import bisect
import ctypes
import fcntl
import mmap
import os
import platform
import struct
from pathlib import Path

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
