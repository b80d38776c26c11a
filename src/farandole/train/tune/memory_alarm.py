"""Whether memory is about to run out on this rank, so that nothing that takes more may stay."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from ...comm.device.accelerator import memory_of
from ...core.vocabulary.units import format_bytes
from ...launch.doctor.facts.machine import read_memory

LEAST_SHARE = 0.03
"""Share of the memory, the host's or the accelerator's, that must stay available."""


def memory_alarm(device: torch.device) -> str:
    """Return what is wrong; empty where nothing is, or nothing is known."""
    memory = memory_of(device)
    if memory is not None:
        unused = memory.reserved - memory.allocated
        return _judge(memory.free + unused, memory.total, f"the memory of {device}")
    found = read_memory()
    available, total_bytes = found["memory_available_bytes"], found["memory_bytes"]
    if available is None or total_bytes is None:
        return ""
    return _judge(available, total_bytes, "the memory of the host")


def has_room(device: torch.device, sharers: int) -> bool:
    """Return whether this process could hold twice what it holds. `sharers`: ranks with the same host memory."""
    memory = memory_of(device)
    if memory is not None:
        return memory.free >= memory.reserved
    available = read_memory()["memory_available_bytes"]
    return available is not None and available >= sharers * _held_bytes()


def _held_bytes() -> int:
    """Return the memory of this process, in bytes."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _judge(available_bytes: int, total_bytes: int, what: str) -> str:
    if available_bytes >= LEAST_SHARE * total_bytes:
        return ""
    return f"{what} is nearly used up ({format_bytes(available_bytes)} of {format_bytes(total_bytes)} left)"
