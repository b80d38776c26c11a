"""What the step benchmark compares: our reducer under several plans, and the alternatives a user would try.

A contender makes its own copy of the model and trains it by one call a step.

[Note: one bucket for PowerSGD] Torch's PowerSGD hook starts its later rounds from callbacks, in whatever order
buckets get there. With several buckets ranks then disagree on the order of collectives, and gloo aborts
(measured, torch 2.13, two ranks, five buckets). With one bucket there is one order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...train.distribute import distribute
from .contender_names import Settings, check_contender, plan_of

MakeModel = Callable[[], nn.Module]
MakeOptimizer = Callable[..., torch.optim.Optimizer]
LossOf = Callable[[nn.Module], torch.Tensor]
FIRST_SCALE = 1024.0
"""Loss scale in fp16: torch's own begins so high that its first steps overflow, and are no steps."""


@dataclass(eq=False)
class Contender:
    """A model in training."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_of: LossOf
    scaler: torch.amp.GradScaler = field(default_factory=lambda: torch.amp.GradScaler("cpu", enabled=False))
    """Keeps small gradients of 16-bit numbers from becoming zero, where `train_in` says so."""

    def train_in(self, precision: str, device: str) -> None:
        """Compute loss and forward in `precision`, one of `PRECISIONS`, by autocast; weights stay float32."""
        if precision == "fp32":
            return
        exact, dtype = self.loss_of, torch.bfloat16 if precision == "bf16" else torch.float16

        def loss_of(model: nn.Module) -> torch.Tensor:
            with torch.autocast(device, dtype):
                return exact(model)

        self.loss_of = loss_of
        if dtype is torch.float16:
            self.scaler = torch.amp.GradScaler(device, init_scale=FIRST_SCALE)

    def step(self) -> torch.Tensor:
        """Train one step; return this rank's loss."""
        self.optimizer.zero_grad()
        loss = self.loss_of(self.model)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()


def make_contender(
    name: str, make_model: MakeModel, loss_of: LossOf, make_optimizer: MakeOptimizer,
    settings: Settings = MappingProxyType({}),
) -> Contender:  # fmt: skip
    """Make the contender called `name`; `settings` are plan keys for our own.

    ``none``, ``int8``, ... : our reducer with that codec (with ``+bucket_bytes=4MiB`` and the like: further
    plan keys). ``ddp[:MB]``, ``ddp-fp16``, ``ddp-powersgd[:RANK]``, ``ddp-nosync`` (no exchange at all: compute
    alone): the rivals.
    """
    check_contender(name, settings)
    torch.manual_seed(0)
    model = make_model()
    if name.startswith("ddp"):
        return _ddp(name, model, loss_of, make_optimizer)
    plan = plan_of(name, settings)
    optimizer = make_optimizer(model.parameters())
    distribute(model, optimizer, plan)
    return Contender(name, model, optimizer, loss_of)


_ONE_BUCKET = 1 << 20
"""Megabytes of a bucket that takes every model."""


def _ddp(name: str, model: nn.Module, loss_of: LossOf, make_optimizer: MakeOptimizer) -> Contender:
    kind, _, value = name.partition(":")
    optimizer = make_optimizer(model.parameters())
    if kind == "ddp-nosync":
        return Contender(name, model, optimizer, loss_of)
    megabytes = int(value) if kind == "ddp" and value else 25
    if kind == "ddp-powersgd":
        megabytes = _ONE_BUCKET  # see [Note: one bucket for PowerSGD]
    wrapped = DistributedDataParallel(model, bucket_cap_mb=megabytes, gradient_as_bucket_view=True)
    if kind == "ddp-fp16":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        wrapped.register_comm_hook(None, fp16_compress_hook)
    elif kind == "ddp-powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        state = powerSGD_hook.PowerSGDState(
            dist.group.WORLD,
            matrix_approximation_rank=int(value or 4),
            start_powerSGD_iter=2,
            use_error_feedback=True,
            warm_start=True,
        )
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return Contender(name, wrapped, optimizer, loss_of)
