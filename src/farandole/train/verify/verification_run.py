"""``farandole verify``: watch a user's script for a few steps, then answer and stop it.

Used only under that command. It sees what the script does through torch's own global hooks (forward,
optimizer step) and, for the loss, by standing in front of `torch.Tensor.backward`; `stop` takes all
of it back.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...comm.world.world import World
from ...core.vocabulary.run_files import VERIFY, write_private
from ...parallel.apply import distributed_models
from ..data.loader_watch import samples_of
from .deep_check import DeepCheck
from .mean_counts import MeanCounts
from .verify import (
    Check,
    Verification,
    check_batch_norm,
    check_batches,
    check_equal,
    check_gradients,
    check_loss,
    check_ranks,
    check_sizes,
    fingerprint,
    optimizer_tensors,
)


class VerificationRun:
    """Watches `steps` optimizer steps, writes ``verify.json`` on rank 0, and ends the script with exit code 0."""

    def __init__(self, world: World, steps: int, directory: Path | None, deep: bool = False) -> None:
        self._world = world
        self._steps = steps
        self._directory = directory
        self._batches: list[str] = []
        self._losses: list[float] = []
        self._optimizers: list[Optimizer] = []
        self._handles: list[Any] = []
        self._backward: Any = None
        self._concluded = False
        self._deep = DeepCheck(world) if deep and world.size > 1 else None
        self._counts = MeanCounts(world) if self._deep is None else None
        self._samples: list[int] = []

    def start(self) -> None:
        """Begin to watch."""
        self._handles = [
            register_module_forward_pre_hook(self._before_forward),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._backward = torch.Tensor.backward
        original = self._backward
        losses = self._losses

        def backward(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.numel() == 1:
                losses.append(float(tensor.detach()))
            return original(tensor, *args, **kwargs)

        torch.Tensor.backward = backward  # type: ignore[method-assign, assignment]
        if self._deep is not None:
            self._deep.start()
        if self._counts is not None:
            self._counts.start()

    def stop(self) -> None:
        """Stop watching; answer with what was seen when the script ended before its time."""
        if not self._concluded:
            self._conclude()
        if self._deep is not None:
            self._deep.stop()
        if self._counts is not None:
            self._counts.stop()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._backward is not None:
            torch.Tensor.backward = self._backward  # type: ignore[method-assign]
            self._backward = None

    def forget(self) -> None:
        """In a forked child: watch no more, and answer nothing."""
        self._concluded = True
        self.stop()

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if module.training and any(module is model for model in distributed_models()):
            self._batches.append(fingerprint(inputs))
            self._samples.append(samples_of(inputs))

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not any(optimizer is known for known in self._optimizers):
            self._optimizers.append(optimizer)
        if self._world.session.steps.done >= self._steps and not self._concluded:
            self._conclude()
            raise SystemExit(0)

    def _conclude(self) -> None:
        self._concluded = True
        here = self._world
        models = distributed_models()
        checks = [check_ranks(here)]
        if not models:
            checks.append(
                Check("model", False, "no model was distributed", "call fd.distribute(model, optimizer)")
            )
        for model in models:
            checks += [
                check_equal(here, "parameters", dict(model.named_parameters()), _ALIKE),
                check_equal(here, "buffers", dict(model.named_buffers()), _ALIKE),
                check_gradients(here, model),
                *check_batch_norm(here, model),
            ]
            own = {id(parameter) for parameter in model.parameters()}
            for optimizer in self._optimizers:
                if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
                    tensors = optimizer_tensors(optimizer, model)
                    checks.append(check_equal(here, "optimizer state", tensors, _ALIKE))
        if self._deep is not None:
            checks += self._deep.checks()
        if self._counts is not None:
            checks += self._counts.checks()
        checks += check_sizes(here, self._samples)
        checks.append(check_batches(here, self._batches))
        checks.append(check_loss(here, self._losses))
        if here.rank == 0 and self._directory is not None:
            write_private(self._directory / VERIFY, json.dumps(Verification(checks).to_mapping(), indent=1))


_ALIKE = "change the model on all ranks alike, after fd.distribute"
