"""`fd.log`: what only the training loop knows, for the progress line, the metrics and the report."""

from __future__ import annotations

import torch

from ..comm.world.world import world
from ..core.vocabulary.errors import ConfigError
from ..core.vocabulary.events import Logged


def log(
    *, loss: float | torch.Tensor | None = None, tokens: int | None = None, total_steps: int | None = None
) -> None:
    """Tell the run about this step: its loss on this rank, its tokens on this rank, how many steps there will be.

    Call it before ``optimizer.step()``; all of it is optional.
    """
    if isinstance(loss, torch.Tensor):
        if loss.numel() != 1:
            raise ConfigError(f"log: loss has shape {tuple(loss.shape)}, expected one number")
        loss = float(loss.detach())
    world().recorder.record(Logged(loss, tokens, total_steps))
