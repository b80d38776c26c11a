"""Writes one file from memory: hashed meanwhile, past the page cache if possible, fsynced with its directory."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from ..directory import FILE_MODE, sync_directory
from ..shard_file import ALIGNMENT_BYTES, digest

_CHUNK_BYTES = 8 << 20
_NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


def write_file(
    path: Path,
    memory: memoryview,
    ranges: Sequence[tuple[int, int]],
    between: Callable[[], None] = lambda: None,
) -> list[str]:
    """Write `memory` to the new file `path`, have it on the disk, and return the hashes of `ranges` of it.

    Args:
        path: must not exist. After an error it is removed, so that its space is free again.
        memory: the content; where it begins at a page, the page cache is not filled with it.
        ranges: begin and end of each range, in bytes.
        between: called between writes; what it raises ends them.

    Raises:
        OSError: a full or failing disk.
    """
    with ThreadPoolExecutor(1) as threads:  # hashlib and writing both release the GIL
        hashes = threads.submit(lambda: [digest(memory[begin:end]) for begin, end in ranges])
        descriptor, is_direct = _create(path)
        try:
            try:
                _write_all(descriptor, memory, is_direct, between)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            sync_directory(path.parent)
            return hashes.result()
        except BaseException:
            with suppress(OSError):
                path.unlink()
            raise


def _create(path: Path) -> tuple[int, bool]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, FILE_MODE), True
    except OSError as problem:
        if problem.errno not in _NOT_DIRECT:
            raise
    with suppress(FileNotFoundError):  # some file systems make the file before they refuse the flag
        path.unlink()
    return os.open(path, flags, FILE_MODE), False


def _write_all(descriptor: int, memory: memoryview, is_direct: bool, between: Callable[[], None]) -> None:
    at = 0
    while at < len(memory):
        between()
        end = min(at + _CHUNK_BYTES, len(memory))
        if is_direct and end - at >= ALIGNMENT_BYTES:
            end -= (end - at) % ALIGNMENT_BYTES
        elif is_direct:
            is_direct = _leave_direct(descriptor)
        try:
            at += os.write(descriptor, memory[at:end])
        except OSError as problem:
            if not is_direct or problem.errno not in _NOT_DIRECT:
                raise
            is_direct = _leave_direct(descriptor)


def _leave_direct(descriptor: int) -> bool:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return False
