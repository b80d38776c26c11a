"""`fd.step`: forward and backward of a batch, by micro-batches, under every plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..comm.world.comm_errors import translated
from ..comm.world.world import World, world
from ..core.vocabulary.errors import ConfigError
from .apply import exchange_of, mesh_of, plan_of
from .pipeline.apply import pipeline_of
from .pipeline.micro_batches import as_call, split_batch
from .pipeline.stage import require_loss

LossFunction = Callable[[Any, Any], torch.Tensor]


def step(model: nn.Module, loss_function: LossFunction, inputs: Any, targets: Any = None) -> torch.Tensor:
    """Run forward and backward of a batch; return the mean loss over the samples of all ranks.

    The batch is divided along its first dimension into the plan's ``micro_batches``, one after the other or, with
    a pipeline, by its ``schedule``. Gradients are those of the mean over the micro-batches, and then the mean over
    the ranks. Clip them and step the optimizer as after ``backward()``. Under `torch.no_grad` it only computes the
    loss.

    Args:
        model: a model that `distribute` was called with.
        loss_function: called as ``loss_function(output, targets)`` for each micro-batch, on the ranks that have
            the output; returns the mean over its samples, a tensor with one element.
        inputs: the model's input: a tensor, a tuple (positional arguments) or a dict (named ones).
        targets: what the loss function gets: a tensor, or a tuple, list or dict of tensors.

    Returns:
        A scalar without gradients, the same on all ranks: float32, or float64 for a model in float64.

    Raises:
        ConfigError: the model is not distributed, the batch does not divide, or the loss is no scalar.
        PlanError: the model cannot be cut as the plan says.
        Mismatch: the ranks of one pipeline were given different batches.
        PeerLost: another rank is gone.
    """
    here = world()
    plan, mesh = plan_of(model), mesh_of(model)
    if plan is None or mesh is None:
        raise ConfigError(
            f"fd.step: this {type(model).__name__} is not distributed",
            remedy="model, optimizer = farandole.distribute(model, optimizer)",
        )
    pipeline = pipeline_of(model)
    held = here.session.holds_passes
    try:
        if pipeline is not None:
            here.session.hold_passes(True)
            loss = pipeline.step(loss_function, inputs, targets, held=held)
            here.session.hold_passes(held)
            exchange = exchange_of(model)
            if exchange is not None and not held and torch.is_grad_enabled():
                exchange.flush()
        else:
            loss = _plain(here, model, loss_function, split_batch(inputs, targets, plan.micro_batches or 1), held)
    finally:
        here.session.hold_passes(held)
    mean = _mean(here, loss, mesh.size("pipeline"))
    return mean if any(each.dtype == torch.float64 for each in model.parameters()) else mean.float()


def _plain(
    here: World, model: nn.Module, loss_function: LossFunction, parts: list[tuple[Any, Any]], held: bool
) -> torch.Tensor:
    losses = []
    trains = torch.is_grad_enabled()
    for number, (inputs, targets) in enumerate(parts):
        here.session.hold_passes(held or number + 1 < len(parts))
        arguments, named = as_call(inputs)
        loss = require_loss(loss_function(model(*arguments, **named), targets), trains=trains)
        if trains:
            torch.autograd.backward(loss, torch.full_like(loss, 1.0 / len(parts)))
        losses.append(loss.detach())
    return torch.stack(losses).double().mean()


def _mean(here: World, loss: torch.Tensor, pipeline_ranks: int) -> torch.Tensor:
    """Return the mean over the ranks; those of one pipeline have the same loss."""
    mean = loss.detach().to(device=here.device, dtype=torch.float64).reshape(1)
    if here.size > pipeline_ranks:
        with translated(here, "mean of the loss"):
            dist.all_reduce(mean, group=here.group)
        mean /= here.size
    return mean[0]
