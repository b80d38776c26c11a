"""What is asked of accelerators besides streams: which are there, their memory, random numbers, times and names.

The one file that names a kind's own module (`torch.get_device_module`), with `streams` beside it: all others ask
here, by a `torch.device`. A question about a CPU or "meta" does nothing, or answers None: callers make no cases.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

GPU = "cuda"
"""The kind that ranks take where none is named: NVIDIA's GPUs, and AMD's by ROCm. Others are asked for by name."""


class DeviceMemory(NamedTuple):
    """The memory of one device, in bytes."""

    free: int
    """Free for all processes."""
    total: int
    reserved: int
    """Taken by this process's allocator, in use or not."""
    allocated: int
    """In tensors of this process."""


# -- which are there -------------------------------------------------------------------------------


def is_accelerator(device: torch.device) -> bool:
    """Return whether `device` computes behind the host, in memory of its own."""
    return device.type not in ("cpu", "meta")


def accelerators() -> tuple[str, int]:
    """Return the kind of the accelerators that torch sees here, and how many; ("", 0) where there are none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return ("", 0) if found is None else (found.type, torch.accelerator.device_count())


def gpu_count() -> int:
    """Return how many GPUs there are that ranks take unasked; see `GPU`."""
    kind, count = accelerators()
    return count if kind == GPU else 0


def local_gpu(local_rank: int) -> torch.device | None:
    """Return the GPU of the rank with this number on its host; None where there is none."""
    count = gpu_count()
    return torch.device(GPU, local_rank % count) if count else None


def backend_of(device: torch.device) -> str:
    """Return torch's own backend for a kind of accelerator: "nccl" for GPUs; empty where it has only gloo."""
    found = str(dist.Backend.default_device_backend_map.get(device.type, "")) if is_accelerator(device) else ""
    return "" if found == "gloo" else found


# -- the current device ----------------------------------------------------------------------------


def set_device(device: torch.device) -> None:
    """Let `device` be this thread's, where it is an accelerator."""
    if is_accelerator(device):
        torch.accelerator.set_device_index(device)


def current_index() -> int:
    """Return the index of this thread's device."""
    return torch.accelerator.current_device_index()


@contextmanager
def same_device(device: torch.device) -> Generator[None, None, None]:
    """Go back, after a block, to this thread's device of before, where `device` is an accelerator."""
    before = current_index() if is_accelerator(device) else None
    try:
        yield
    finally:
        if before is not None:
            torch.accelerator.set_device_index(before)


def synchronize(device: torch.device) -> None:
    """Let the host wait for all that `device` has been told to do."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def synchronize_stream(device: torch.device) -> None:
    """Let the host wait for what `device` has been told on this thread's stream."""
    if is_accelerator(device):
        torch.accelerator.current_stream(device).synchronize()


# -- names -----------------------------------------------------------------------------------------


def model_of(device: torch.device) -> str:
    """Return what `device` calls itself; empty for a CPU."""
    return str(_module(device).get_device_name(device)) if is_accelerator(device) else ""


def unique_id(device: torch.device) -> str:
    """Return what tells the accelerators of all hosts apart; empty for a CPU, and where torch does not know."""
    read = getattr(_module(device), "get_device_properties", None) if is_accelerator(device) else None
    return "" if read is None else str(getattr(read(device), "uuid", ""))


def nccl_version() -> tuple[int, ...]:
    """Return NCCL's version, (2, 28, 9); empty where torch has none."""
    if not (dist.is_available() and dist.is_nccl_available()):
        return ()
    return tuple(int(part) for part in torch.cuda.nccl.version()[:3])


# -- memory ----------------------------------------------------------------------------------------


def memory_of(device: torch.device) -> DeviceMemory | None:
    """Return the memory of `device`; None for a CPU, and a kind that does not say."""
    read = getattr(_module(device), "mem_get_info", None) if is_accelerator(device) else None
    if read is None:
        return None
    free, total = read(device)
    reserved, allocated = torch.accelerator.memory_reserved(device), torch.accelerator.memory_allocated(device)
    return DeviceMemory(int(free), int(total), int(reserved), int(allocated))


def peak_bytes(device: torch.device) -> int | None:
    """Return the most bytes of tensors that this process has had on `device`; None as of `memory_of`."""
    if not is_accelerator(device) or not hasattr(_module(device), "mem_get_info"):
        return None
    return int(torch.accelerator.max_memory_allocated(device))


def limit_memory(device: torch.device, limit_bytes: int) -> bool:
    """Let this process take at most `limit_bytes` of `device`; return False where it has no limit."""
    memory = memory_of(device)
    set_share = None if memory is None else getattr(_module(device), "set_per_process_memory_fraction", None)
    if memory is None or set_share is None:
        return False
    set_share(min(1.0, limit_bytes / memory.total), device)
    return True


# -- random numbers --------------------------------------------------------------------------------


def generator_of(device: torch.device) -> torch.Generator | None:
    """Return the generator of an accelerator; None for a CPU, and a kind that torch gives no generators of."""
    module = _module(device) if is_accelerator(device) else None
    if module is None or not hasattr(module, "default_generators"):
        return None
    module.init()
    found: torch.Generator = module.default_generators[current_index() if device.index is None else device.index]
    return found


def random_states() -> list[torch.Tensor]:
    """Return the states of all accelerators' generators, (bytes,) of uint8 each; none before one is used."""
    module = _used_module()
    return [] if module is None else list(module.get_rng_state_all())


def set_random_states(states: Sequence[torch.Tensor]) -> None:
    """Set what `random_states` returned."""
    module = _used_module()
    if states and module is not None:
        module.set_rng_state_all(list(states))


def is_in_use() -> bool:
    """Return whether this process uses an accelerator."""
    return _used_module() is not None


# -- times -----------------------------------------------------------------------------------------


def timing_event(device: torch.device) -> torch.Event:
    """Return an event of `device` that keeps when it was passed."""
    return torch.Event(device, enable_timing=True)


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _used_module() -> Any:
    kind = torch.accelerator.current_accelerator()
    module = None if kind is None else _module(kind)
    is_used = getattr(module, "is_initialized", None)
    return module if is_used is not None and hasattr(module, "get_rng_state_all") and is_used() else None
