"""A notice about float16 of the script's own, whose gradients nothing scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from ...comm.world.world import World
from ...core.vocabulary.notice import write_notice
from .nested_step import is_nested_step
from .step_hooks import scaler_around


class ScalerWatch:
    """The step pre-hook that misses a `GradScaler` around steps after ``torch.autocast`` in float16."""

    def __init__(self, here: World, in_float16: Callable[[], bool]) -> None:
        """`in_float16`: whether the last forward pass with gradients ran so."""
        self._here, self._in_float16 = here, in_float16
        self._is_noticed = False

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        """Write one notice, on rank 0."""
        if self._is_noticed or not self._in_float16() or is_nested_step(optimizer) or scaler_around() is not None:
            return
        self._is_noticed = True
        if self._here.rank == 0:
            write_notice(
                "warning: the forward pass runs under autocast in float16 and no GradScaler scales the loss, so "
                'gradients below 6e-8 are lost; set precision = "fp16" in the plan, or use torch.amp.GradScaler'
            )
