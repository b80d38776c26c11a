"""The file of one rank: safetensors, whose tensors are pieces of the checkpoint's tensors.

[Note: every byte is hashed] A file is its header and then the pieces, one behind the other without a gap. The
manifest has a hash of the header and one of each piece. So there is no byte in it that can change unseen, and a
piece can be checked without reading the others.

SHA-256 was chosen by measuring: with the CPU's instructions for it, it runs at 1.7 GB/s a core where
blake2b runs at 0.9 and zlib's crc32, which is no protection against intent, at 4. `hashlib` releases the GIL.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import mmap
import os
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.vocabulary.errors import CheckpointError

ALIGNMENT_BYTES = 4096
"""The data begin at a multiple of this, so that they can be written past the page cache."""
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, and where it is in a file."""

    tensor: str
    """Name of the tensor that it belongs to."""
    dtype: str
    """torch's name of its type."""
    offsets: tuple[int, ...]
    """Where it begins in the tensor, one a dimension."""
    shape: tuple[int, ...]
    begin: int
    """Where it begins in the file, in bytes."""

    @property
    def nbytes(self) -> int:
        """Its size."""
        return tensor_bytes(self.dtype, self.shape)

    @property
    def key(self) -> str:
        """Its name in the file."""
        return piece_key(self.tensor, self.offsets)


def piece_key(tensor: str, offsets: tuple[int, ...]) -> str:
    """Return a piece's name in its file: that of the tensor, and where in it the piece begins."""
    return f"{tensor}@{','.join(map(str, offsets))}" if any(offsets) else tensor


def lay_out(boxes: Sequence[tuple[str, str, tuple[int, ...], tuple[int, ...]]]) -> tuple[bytes, list[Piece], int]:
    """Return the file's header, its pieces and its size in bytes.

    Args:
        boxes: name of the tensor, type, offsets and shape of each piece, in the order of the file.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "farandole checkpoint shard"}}
    relative: list[int] = []
    at = 0
    for tensor, dtype, offsets, shape in boxes:
        nbytes = tensor_bytes(dtype, shape)
        kind, stored = file_layout(dtype, shape)
        key = piece_key(tensor, offsets)
        header[key] = {"dtype": kind, "shape": list(stored), "data_offsets": [at, at + nbytes]}
        relative.append(at)
        at += nbytes
    if len(header) != len(boxes) + 1:
        raise CheckpointError("two pieces of one name in a file of a checkpoint")
    text = json.dumps(header, separators=(",", ":")).encode()
    padded = -(-(len(text) + _LENGTH.size) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    head = _LENGTH.pack(padded - _LENGTH.size) + text.ljust(padded - _LENGTH.size)
    pieces = [
        Piece(tensor, dtype, offsets, shape, padded + begin)
        for (tensor, dtype, offsets, shape), begin in zip(boxes, relative, strict=True)
    ]
    return head, pieces, padded + at


def digest(data: bytes | memoryview) -> str:
    """Return the hash of bytes, as the manifest has it."""
    return hashlib.sha256(data).hexdigest()


# Reads bytes of a file and hashes them on the way, past the page cache where that is of no use.
#
# [Note: past the cache] Pages for the cache and the copy out of them cost CPU time beside the hash. So what is
# read once goes through a small buffer of each thread, and is hashed there and copied. What is in the cache
# already is read from there, and so is what a file system does not read otherwise.


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


# Types of tensors: the names in a manifest are torch's, those in the files are safetensors'.


ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2, "int32": 4,
    "uint32": 4, "float32": 4, "complex32": 4, "int64": 8, "uint64": 8, "float64": 8, "complex64": 8,
    "complex128": 16,
}  # fmt: skip
"""torch's names of the types that a checkpoint may have, and the bytes of an element."""

_SAFETENSORS = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "float16": "F16",
    "bfloat16": "BF16", "int32": "I32", "uint32": "U32", "float32": "F32", "int64": "I64", "uint64": "U64",
    "float64": "F64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


def file_layout(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return safetensors' type and shape for a tensor; one of a type it does not know is stored as bytes."""
    if dtype in _SAFETENSORS:
        return _SAFETENSORS[dtype], shape
    return "U8", (*shape, ITEM_BYTES[dtype])


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the size of a tensor."""
    return math.prod(shape) * ITEM_BYTES[dtype]


def dtype_of_safetensors(kind: object) -> str | None:
    """Return torch's name of a type of safetensors; None for one that a checkpoint cannot have."""
    return next((dtype for dtype, name in _SAFETENSORS.items() if name == kind), None)
