"""`fd.log`: what only the training loop knows, for the progress line, the metrics and the report."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..comm.world.world import world
from ..core.vocabulary.errors import ConfigError
from ..core.vocabulary.events import Logged
from .metrics.trackers import Trackers


def log(
    *,
    loss: float | torch.Tensor | None = None,
    tokens: int | None = None,
    samples: int | None = None,
    total_steps: int | None = None,
    metrics: Mapping[str, float | torch.Tensor] | None = None,
) -> None:
    """Report values of the current step for the progress line, the metrics and the report.

    Call it before ``optimizer.step()``. All arguments are optional. `metrics` of rank 0 go to the run directory,
    for the report and ``farandole top``; they and its `loss` also go to the trackers of ``init(log_with=...)``.

    Args:
        loss: mean loss over this rank's samples, a number or a tensor with one element.
        tokens: number of tokens in this rank's batch.
        samples: number of samples in this rank's batch, for loops without a loader of `shard`, which knows them.
            If both say something this holds; of several calls in a step they add up.
        total_steps: number of steps of the whole run.
        metrics: other values by name, numbers or tensors with one element; `mean` is for means over the ranks.

    Raises:
        ConfigError: `loss` or a metric is no number or has several elements, or `samples` is no count.
    """
    here = world()
    if isinstance(loss, torch.Tensor):
        if loss.numel() != 1:
            raise ConfigError(f"log: loss has shape {tuple(loss.shape)}, expected one number")
        loss = float(loss.detach())
    if samples is not None and (type(samples) is not int or samples < 0):
        raise ConfigError(f"log: samples = {samples!r}, expected a whole number from 0")
    values = {} if metrics is None else {name: _number(name, value) for name, value in metrics.items()}
    here.session.recorder.record(Logged(loss, tokens, total_steps, values or None, batch_samples=samples))
    trackers = here.session.keep(Trackers, Trackers)
    if values and here.rank == 0:
        trackers.say_if_lost()
    if loss is not None:
        values = {"loss": float(loss), **values}
    if values:
        trackers.log(values, here.session.steps.done + 1)


def _number(name: str, value: float | torch.Tensor) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value.detach())
    if isinstance(value, torch.Tensor):
        raise ConfigError(f"log: metric {name!r} has shape {tuple(value.shape)}, expected one number")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"log: metric {name!r} is {value!r}, expected a number") from None
