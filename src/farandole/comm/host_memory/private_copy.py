"""Replaces shared memory by a private copy, without notice to the processes that share it.

[Note: the same memory at another address] Tensors and arrays on shared memory know its address. To keep what they
hold from being overwritten, the *shared* pages are mapped once more, at another address, and a private copy
takes the place of the old mapping. mremap(2) does both: of a shared mapping, with an old size of 0, it makes a
second one; and it moves pages over others in one step, so that no reader ever meets a hole.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import torch

from ..world.forks import memory_calls

_MAY_MOVE, _FIXED = 1, 2
_FAILED = ctypes.c_void_p(-1).value


def leave_mapping(memory: torch.Tensor) -> torch.Tensor:
    """Return the shared `memory`, uint8, at another address; where it was lies a private copy from now on.

    `memory` is a whole mapping, as `host_memory.share` and this function make it, and it is not written to
    meanwhile. Raises OSError when there is no memory for the copy.
    """
    byte_count = memory.numel()
    old = memory.data_ptr()
    again = _remap(old, 0, byte_count, _MAY_MOVE, None)
    copy = -1
    try:
        copy = _map_private(byte_count)
        ctypes.memmove(copy, old, byte_count)
        _remap(copy, byte_count, byte_count, _MAY_MOVE | _FIXED, old)
    except OSError:
        for address in (again, copy):
            if address != -1:
                memory_calls().munmap(address, byte_count)
        raise
    return _tensor_at(again, byte_count)


def _tensor_at(address: int, byte_count: int) -> torch.Tensor:
    """Return a tensor over a mapping that ends with the tensor's storage."""
    block = (ctypes.c_uint8 * byte_count).from_address(address)
    # Not at the end of the process: tensors may outlive the finalizers there.
    weakref.finalize(block, memory_calls().munmap, address, byte_count).atexit = False
    return torch.frombuffer(block, dtype=torch.uint8)


def _map_private(byte_count: int) -> int:
    private = memory_calls().mmap(
        None, byte_count, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
    )
    return _checked(private)


def _remap(address: int, old_bytes: int, new_bytes: int, flags: int, to: int | None) -> int:
    return _checked(memory_calls().mremap(address, old_bytes, new_bytes, flags, to))


def _checked(address: int | None) -> int:
    if address is None or address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address
