"""Whether a loss compares the samples of a batch with each other, as contrastive, Dice and RMSE losses do.

Each rank has its own samples only, so the mean of the ranks' losses is then not the loss of the joined batch.

[Note: coupled samples] The gradient that a loss gives to the output of one sample depends on the outputs of others
only if the loss couples them. So the loss is differentiated twice, from itself to the model's outputs: the
derivative of the gradients of the first half of the samples by the outputs of the second half is zero, exactly,
for a mean over samples. A loss that couples samples without a second derivative between them is not found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...comm.batch_weight.nested_tensors import tensors_in
from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...parallel.instrument.phase_hooks import observe_passes
from ..data.loader_watch import samples_of
from ..metrics.own_rows import has_gathered
from .replay import ancestors
from .verify import Check

_SMALLEST_SHARE = 1e-6
"""As a part of all second derivatives; less is rounding."""


class JoinedLoss:
    """Looks at each backward pass from a loss to outputs with one row for each sample, until one couples them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rows = 0
        self._outputs: list[torch.Tensor] = []
        self._couples = False
        self._stop: Callable[[], None] | None = observe_passes(world, self)

    def stop(self) -> None:
        """See no more passes."""
        self._outputs = []
        if self._stop is not None:
            self._stop()
        self._stop = None

    def forward_begins(self, model: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """A pass of a distributed model begins."""
        self._rows = samples_of(arguments) or samples_of(dict(named))

    def forward_ends(self, model: nn.Module, output: Any) -> None:
        """Keep its outputs until the next backward pass."""
        if not self._couples and self._rows > 1:
            self._outputs += [tensor for tensor in tensors_in(output) if tensor.requires_grad]

    def backward_begins(self, loss: torch.Tensor) -> None:
        """Look at the loss, before its own backward pass."""
        outputs, self._outputs = self._outputs, []
        of_samples = [each for each in outputs if each.dim() and each.shape[0] == self._rows]
        if self._couples or not of_samples or loss.numel() != 1 or not loss.requires_grad or has_gathered(loss):
            return
        with _without_hooks([loss, *outputs]):
            self._couples = _couples(loss, _last(of_samples))

    def checks(self) -> list[Check]:
        """Name a loss that couples samples; to be called by all ranks."""
        if not any(all_gather_json(self._world, "verify/joined loss", self._couples)):
            return []
        answer = "it compares the samples of a batch with each other, and each rank has its own only"
        remedy = "compute it from fd.gather(outputs, gradients=True)"
        return [Check("loss of the joined batch", None, answer, remedy, word="not exact")]


def _last(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the outputs that no other is computed from: what lies between two is the model's business."""
    before = {node for each in outputs for node in ancestors(each)}
    return [each for each in outputs if each.grad_fn not in before]


def _couples(loss: torch.Tensor, outputs: Sequence[torch.Tensor]) -> bool:
    """See [Note: coupled samples]."""
    half = outputs[0].shape[0] // 2
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.enable_grad():
            first = torch.autograd.grad(loss, outputs, create_graph=True, retain_graph=True, allow_unused=True)
            parts = [
                (each[:half] * torch.rand(each[:half].shape, generator=generator).to(each)).sum()
                for each in first
                if each is not None and each.requires_grad
            ]
            if not parts:
                return False  # linear in the outputs
            total = torch.stack(parts).sum()
            second = torch.autograd.grad(total, outputs, retain_graph=True, allow_unused=True)
    except RuntimeError:
        return False  # a function without a second derivative: it cannot be told
    there = [each.detach().abs().double() for each in second if each is not None]
    across = sum(float(each[half:].sum()) for each in there)
    return across > _SMALLEST_SHARE * sum(float(each.sum()) for each in there)


@contextmanager
def _without_hooks(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Keep those who wait for the backward pass, the reducer among them, from taking this for it."""
    taken: list[tuple[Any, dict[int, Any]]] = []
    for tensor in tensors:
        hooks: Any = tensor._backward_hooks
        if hooks:
            taken.append((hooks, dict(hooks)))
            hooks.clear()
    try:
        yield
    finally:
        for hooks, were in taken:
            hooks.update(were)
