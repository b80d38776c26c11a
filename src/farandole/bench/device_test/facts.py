"""What is reported of a device, and not judged: versions, memory, and the rates of plain copies."""

from __future__ import annotations

import time

import torch

from ...comm.device.accelerator import memory_of, synchronize
from ...comm.device.tested import versions_of
from .subject import CPU

_COPIED_BYTES = 256 << 20
_COPIES = 5
_SHARE_OF_FREE_MEMORY = 8


def describe(device: torch.device) -> str:
    """Return versions, the device's name and its free memory."""
    words = [f"{name} {value}" for name, value in versions_of(device).items() if value]
    if device.type != CPU:
        free, total = _memory(device)
        words.append(f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free" if total else "memory not known")
    return ", ".join(words)


def describe_rates(device: torch.device) -> str:
    """Return the rates of copies on the device, and from it to memory of the host: pinned, where it can be."""
    free, _ = _memory(device)
    nbytes = min(_COPIED_BYTES, free // _SHARE_OF_FREE_MEMORY) if free else _COPIED_BYTES // 4
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # A copy reads each byte and writes it.
    told = [f"{2 * _copied_per_second(source, target) / 1e9:.1f} GB/s of memory read and written"]
    if device.type != CPU:
        try:
            host, where = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), "pinned"
        except RuntimeError:
            host, where = torch.empty(nbytes, dtype=torch.uint8), "not pinned"
        told.append(f"{_copied_per_second(source, host) / 1e9:.1f} GB/s to the host ({where})")
        told.append(f"{_copied_per_second(host, source) / 1e9:.1f} GB/s from it")
    return ", ".join(told)


def _memory(device: torch.device) -> tuple[int, int]:
    """Return free and all bytes of a device; zeros where torch does not say."""
    found = memory_of(device)
    return (0, 0) if found is None else (found.free, found.total)


def _copied_per_second(source: torch.Tensor, target: torch.Tensor) -> float:
    """Return bytes a second of the fastest of some copies."""
    best = float("inf")
    for _ in range(_COPIES):
        synchronize(source.device)
        synchronize(target.device)
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        synchronize(source.device)
        synchronize(target.device)
        best = min(best, time.perf_counter() - start)
    return source.nbytes / best
