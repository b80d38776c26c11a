"""Reads bytes of a file and hashes them on the way, past the page cache where that is of no use.

[Note: past the cache] Pages for the cache and the copy out of them cost CPU time beside the hash. So what is read
once goes through a small buffer of each thread, and is hashed there and copied. What is in the cache already is
read from there, and so is what a file system does not read otherwise.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import threading
from pathlib import Path

from ..core.vocabulary.errors import CheckpointError
from .shard_file import ALIGNMENT_BYTES

_CHUNK_BYTES = 4 << 20
_LEAST_BYTES = 1 << 20
"""Less is read ahead with its neighbours."""
_local = threading.local()


def read_and_hash(path: Path, begin: int, content: memoryview, *, direct: bool) -> str:
    """Fill `content` with the bytes of a file from `begin` on, and return their hash.

    Args:
        path: the file.
        begin: in bytes.
        content: flat memory of bytes.
        direct: past the page cache, if that does not have them and the file system can.

    Raises:
        CheckpointError: the file ends before, or cannot be read.
    """
    try:
        with path.open("rb", buffering=0) as file:
            if direct and len(content) >= _LEAST_BYTES and not _is_cached(file.fileno(), begin):
                try:
                    return _read_direct(path, begin, content)
                except OSError as problem:
                    if problem.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                        raise
            return _read_cached(path, file.fileno(), begin, content)
    except OSError as problem:
        raise CheckpointError(f"cannot read {path}: {problem.strerror or problem}", is_input=True) from None


def _is_cached(descriptor: int, begin: int) -> bool:
    try:
        return os.preadv(descriptor, [bytearray(1)], begin, os.RWF_NOWAIT) == 1
    except OSError:
        return False


def _read_cached(path: Path, descriptor: int, begin: int, content: memoryview) -> str:
    hasher = hashlib.sha256()
    at = 0
    while at < len(content):
        part = content[at : at + _CHUNK_BYTES]
        count = os.preadv(descriptor, [part], begin + at)
        if not count:
            raise _truncated(path)
        hasher.update(part[:count])
        at += count
    return hasher.hexdigest()


def _read_direct(path: Path, begin: int, content: memoryview) -> str:
    hasher = hashlib.sha256()
    if not hasattr(_local, "buffer"):
        _local.buffer = mmap.mmap(-1, _CHUNK_BYTES)  # begins at a page, as O_DIRECT asks
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    try:
        with memoryview(_local.buffer) as buffer:
            at = 0
            while at < len(content):
                skipped = (begin + at) % ALIGNMENT_BYTES
                wanted = -(-(skipped + len(content) - at) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
                count = os.preadv(descriptor, [buffer[:wanted]], begin + at - skipped) - skipped
                if count <= 0:
                    raise _truncated(path)
                count = min(count, len(content) - at)
                part = buffer[skipped : skipped + count]
                hasher.update(part)
                content[at : at + count] = part
                part.release()
                at += count
    finally:
        os.close(descriptor)
    return hasher.hexdigest()


def _truncated(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} is truncated", is_input=True)
