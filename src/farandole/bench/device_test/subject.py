"""The device under test: whether it is there, and what its kind lets a check do with it."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...comm.device.accelerator import GPU, accelerators, host_waits_are_errors, sleep_cycles
from ...core.vocabulary.errors import ConfigError

CPU = "cpu"
_MOST_DELAY_CYCLES = 200_000
"""About a tenth of a millisecond."""
_DELAYED_SHARE = 0.15


@dataclass(frozen=True)
class Subject:
    """A device of this machine that is there."""

    device: torch.device

    @property
    def has_streams(self) -> bool:
        """Whether it runs behind the host."""
        return self.device.type != CPU

    def use(self) -> AbstractContextManager[Any]:
        """Return what is entered while the device is in use."""
        return nullcontext()

    def delays(self, seed: int) -> AbstractContextManager[Any] | None:
        """Return what lets the device wait before operations drawn by `seed`; None where it has no such wait."""
        return _Delays(seed) if self.device.type == GPU else None

    def no_host_waits(self) -> AbstractContextManager[Any] | None:
        """Return what makes a host that waits for the device an error; None where torch does not look."""
        return host_waits_are_errors() if self.device.type == GPU else None


def find_devices(kind: str) -> int:
    """Return how many devices of a kind there are; raise `ConfigError`, with what torch sees, if there is none."""
    if kind == CPU:
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


class _Delays(TorchDispatchMode):
    """Lets the current stream of a CUDA device sleep before some operations."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._drawn = random.Random(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._drawn.random() < _DELAYED_SHARE:
            sleep_cycles(self._drawn.randrange(_MOST_DELAY_CYCLES))
        return func(*args, **(kwargs or {}))
