"""What is inside, or around, the objects that trainers hand out: wrapped optimizers, and a model's wrapper."""

from __future__ import annotations

import gc
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

_DEEPEST = 8
"""Wrappers around an optimizer."""


def inner_optimizer(candidate: Any) -> Optimizer | None:
    """Return the optimizer that takes hooks: `candidate`, or what it holds as ``.optimizer``; None: there is none.

    Accelerate's ``AcceleratedOptimizer`` calls itself an `Optimizer` and has not run its constructor.
    """
    for _ in range(_DEEPEST):
        if isinstance(candidate, Optimizer) and "_optimizer_step_pre_hooks" in vars(candidate):
            return candidate
        candidate = getattr(candidate, "optimizer", None)
    return None


def ddp_around(model: nn.Module) -> DistributedDataParallel | None:
    """Return the `DistributedDataParallel` of this process that wraps `model`; None: there is none."""
    for each in gc.get_objects():
        if DistributedDataParallel in type(each).__mro__ and vars(each).get("_modules", {}).get("module") is model:
            found: DistributedDataParallel = each
            return found
    return None
