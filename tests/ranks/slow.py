"""What sleeps where a test wants a training to be slow."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import TensorDataset


class SleepInBackward(torch.autograd.Function):
    """Returns its input; its backward pass calls `sleep` first."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sleep: Callable[[], None]) -> torch.Tensor:
        ctx.sleep = sleep
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.sleep()
        return grads[0], None


class SlowSamples(TensorDataset):
    """Sleeps `seconds` for each sample."""

    seconds = 0.0

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return super().__getitem__(index)
