"""How busy this rank's accelerator is and what memory it has left, for the samples of a run.

NVML says both (nvidia-ml-py). Without it, or where it does not know the device, torch says the memory.
"""

from __future__ import annotations

import torch

from ...comm.device.accelerator import memory_of, unique_id
from ...comm.world.world import World
from ...observe.record.host_sampler import AcceleratorFigures, find_gpu


class MemoryFigures:
    """See `AcceleratorFigures`: the memory, as torch says it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> tuple[float | None, int | None, int | None]:
        """See `AcceleratorFigures`; the host does not wait for the device."""
        memory = memory_of(self._device)
        return (None, None, None) if memory is None else (None, memory.total - memory.free, memory.total)

    def close(self) -> None:
        """See `AcceleratorFigures`."""


def figures_of(here: World) -> AcceleratorFigures | None:
    """Return what tells of this rank's accelerator; None for a CPU, and a kind that says nothing."""
    name = unique_id(here.device)
    found = find_gpu(name) if name else None
    if found is not None:
        return found
    return None if memory_of(here.device) is None else MemoryFigures(here.device)
