"""`fd.mean`: one number from all ranks, for what a loop reports."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..comm.world.comm_errors import translated
from ..comm.world.world import world


def mean(value: float | torch.Tensor, samples: float = 1) -> float:
    """Return the mean of `value` over the ranks, weighted by `samples`. Call it on all ranks.

    Args:
        value: this rank's number, or a tensor with one element.
        samples: this rank's weight. A rank without samples passes 0; its value is ignored.

    Returns:
        The same float on all ranks; NaN if all weights are 0.
    """
    here = world()
    number = float(value.detach() if isinstance(value, torch.Tensor) else value)
    weighted = number * samples if samples else 0.0
    both = torch.tensor([weighted, float(samples)], dtype=torch.float64, device=here.device)
    if here.size > 1:
        with translated(here, "mean"):
            dist.all_reduce(both, group=here.group)
    total, count = both.tolist()
    return float(total / count) if count else float("nan")
