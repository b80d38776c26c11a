"""`fd.log`: what only the training loop knows, for the progress line, the metrics and the report."""

from __future__ import annotations

import torch

from ..comm.world.world import world
from ..core.vocabulary.errors import ConfigError
from ..core.vocabulary.events import Logged


def log(
    *, loss: float | torch.Tensor | None = None, tokens: int | None = None, total_steps: int | None = None
) -> None:
    """Report values of the current step for the progress line, the metrics and the report.

    Call it before ``optimizer.step()``. All arguments are optional.

    Args:
        loss: mean loss over this rank's samples, a number or a tensor with one element.
        tokens: number of tokens in this rank's batch.
        total_steps: number of steps of the whole run.

    Raises:
        ConfigError: `loss` has several elements.
    """
    if isinstance(loss, torch.Tensor):
        if loss.numel() != 1:
            raise ConfigError(f"log: loss has shape {tuple(loss.shape)}, expected one number")
        loss = float(loss.detach())
    world().session.recorder.record(Logged(loss, tokens, total_steps))
