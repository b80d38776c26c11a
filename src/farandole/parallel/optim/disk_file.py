"""A file without a name in a directory on disk, mapped into memory: what its pages hold need not stay in memory.

[Note: no name] The file is made by ``O_TMPFILE`` or, where the file system has none, unlinked as soon as it is
open, in a directory of its own that only this user can enter. So nothing is left behind, however the process
ends.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from pathlib import Path

import torch

DEFAULT_DIRECTORY = Path("/var/tmp")
"""By the Filesystem Hierarchy Standard its files survive a reboot, so they are on a disk."""
PAGE_BYTES = mmap.PAGESIZE
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_FILE_MODE = 0o600


class DiskFile:
    """`nbytes` of a disk, as memory. Raises `OSError` if they are not there to have."""

    def __init__(self, directory: Path, nbytes: int) -> None:
        descriptor = _open(directory)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
            self._memory = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED)
        finally:
            os.close(descriptor)

    def tensor(self, offset: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor on the bytes from `offset` on."""
        return torch.frombuffer(self._memory, dtype=dtype, count=elements, offset=offset)

    def fetch(self, offset: int, nbytes: int) -> None:
        """Begin to read pages that are used soon. `offset` is a page's."""
        self._memory.madvise(mmap.MADV_WILLNEED, offset, nbytes)

    def drop(self, offset: int, nbytes: int) -> None:
        """Let go of pages in this process; what was written to them is the kernel's to write to the disk."""
        self._memory.madvise(mmap.MADV_DONTNEED, offset, nbytes)


def why_unusable(directory: Path) -> str:
    """Return why files in `directory` would not be on a disk; empty if they would."""
    if not directory.is_dir():
        return f"{directory} is no directory"
    status = directory.stat()
    number = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        fields = line.split(" ")
        kind = fields[fields.index("-") + 1]
        if fields[2] == number and kind in _IN_MEMORY:
            return f"{directory} is in memory (a {kind}), not on a disk"
    return ""


def _open(directory: Path) -> int:
    """See [Note: no name]."""
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, _FILE_MODE)
    except OSError as problem:
        if problem.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    folder = Path(tempfile.mkdtemp(dir=directory))
    try:
        path = folder / "states"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE)
        path.unlink()
    finally:
        folder.rmdir()
    return descriptor
