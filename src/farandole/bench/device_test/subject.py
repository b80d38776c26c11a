"""The device under test: whether it is there, and what is reported of it and not judged."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ...comm.device.accelerator import accelerators, memory_of, synchronize
from ...comm.device.tested import versions_of
from ...core.vocabulary.errors import ConfigError

CPU = torch.device("cpu")
_COPIED_BYTES = 256 << 20
_COPIES = 5
_SHARE_OF_FREE_MEMORY = 8


@dataclass(frozen=True)
class Subject:
    """A device of this machine that is there."""

    device: torch.device

    def use(self) -> AbstractContextManager[Any]:
        """Return what is entered while the device is in use."""
        return nullcontext()


def find_devices(kind: str) -> int:
    """Return how many devices of a kind there are; raise `ConfigError`, with what torch sees, if there is none."""
    if kind == CPU.type:
        return 1
    found, count = accelerators()
    if found == kind:
        return count
    seen = f"{count} of kind {found}" if found else "no accelerator"
    toolkit = torch.version.cuda or torch.version.hip or ""
    remedy = "is its driver loaded, and the device visible (nvidia-smi, CUDA_VISIBLE_DEVICES)?"
    if found:
        remedy = f"farandole test --device {found}"
    elif not toolkit:
        remedy = "install the torch of its kind: https://pytorch.org/get-started"
    built = f"built for {toolkit}" if toolkit else "built for the CPU alone"
    raise ConfigError(f"--device {kind}: torch {torch.__version__} ({built}) sees {seen}", remedy=remedy)


def describe(device: torch.device) -> str:
    """Return versions, the device's name and its free memory."""
    words = [f"{name} {value}" for name, value in versions_of(device).items() if value]
    if device != CPU:
        memory = memory_of(device)
        known = memory and f"{memory.free / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"
        words.append(known or "memory not known")
    return ", ".join(words)


def describe_rates(device: torch.device) -> str:
    """Return the rates of copies on the device, and from it to memory of the host: pinned, where it can be."""
    memory = memory_of(device)
    nbytes = _COPIED_BYTES // 4 if memory is None else min(_COPIED_BYTES, memory.free // _SHARE_OF_FREE_MEMORY)
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # A copy reads each byte and writes it.
    told = [f"{2 * _copied_per_second(device, source, target) / 1e9:.1f} GB/s of memory read and written"]
    if device != CPU:
        try:
            host, where = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), "pinned"
        except RuntimeError:
            host, where = torch.empty(nbytes, dtype=torch.uint8), "not pinned"
        told.append(f"{_copied_per_second(device, source, host) / 1e9:.1f} GB/s to the host ({where})")
        told.append(f"{_copied_per_second(device, host, source) / 1e9:.1f} GB/s from it")
    return ", ".join(told)


def _copied_per_second(device: torch.device, source: torch.Tensor, target: torch.Tensor) -> float:
    """Return bytes a second of the fastest of some copies on `device`, or from or to it."""
    best = float("inf")
    for _ in range(_COPIES):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return source.nbytes / best
