"""One stage of a model on its rank: forward and backward of micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ...core.vocabulary.errors import ConfigError
from .program import CutProgram, Program, Segment, run_segment
from .split_backward import backward_inputs


class _StagePass(NamedTuple):
    """What is kept of a forward pass until its backward pass."""

    received: dict[int, torch.Tensor]
    """Leaves with gradients."""
    roots: dict[int, torch.Tensor]
    """Values with gradients that were sent on; the loss at -1, and the losses of layers at -2."""
    segment: Segment
    program: Program


_LOSS, _LAYERS = -1, -2
LayerLoss = Callable[[nn.Module], torch.Tensor | None]
"""Returns a loss that a module's last forward pass has beside the loss function's; None if it has none."""


class Stage:
    """The passes of one stage in one step."""

    def __init__(
        self, model: nn.Module, number: int, *, trains: bool, layer_loss: LayerLoss | None = None
    ) -> None:
        """`trains`: whether backward passes follow."""
        self._model, self._number, self._trains, self._layer_loss = model, number, trains, layer_loss
        self.layer_losses: dict[int, torch.Tensor] = {}
        """By micro-batch, detached: added up over the layers of the stage."""
        self._passes: dict[int, _StagePass] = {}
        self._weights: dict[int, Callable[[], None]] = {}

    def forward(
        self,
        micro_batch: int,
        cut: CutProgram,
        inputs: list[torch.Tensor],
        received: list[torch.Tensor],
        *,
        loss_of: Callable[[Any], torch.Tensor],
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Return the tensors for the next stage; of the last stage, the loss, detached."""
        program, segment = cut.program, cut.segments[self._number]
        values = {number: inputs[number] for number in segment.needs_inputs}
        leaves: dict[int, torch.Tensor] = {}
        changed = {before for call in segment.calls for before, _ in call.renames}
        for number, tensor in zip(segment.receives, received, strict=True):
            if program.specs[number].trains and self._trains:
                leaves[number] = tensor.requires_grad_()
            values[number] = tensor.clone() if number in leaves and number in changed else tensor
        output = _run(segment, self._model, values)
        roots = {number: values[number] for number in segment.sends if program.specs[number].trains}
        loss = None
        if segment.output is not None:
            loss = require_loss(loss_of(output), trains=self._trains)
            roots[_LOSS] = loss
        extra = self._loss_of_layers(segment)
        if extra is not None:
            self.layer_losses[micro_batch] = extra.detach()
            roots[_LAYERS] = extra
        if self._trains:
            self._passes[micro_batch] = _StagePass(leaves, roots, segment, program)
        sent = [values[number].detach().contiguous() for number in segment.sends]
        return sent, None if loss is None else loss.detach()

    def _loss_of_layers(self, segment: Segment) -> torch.Tensor | None:
        if self._layer_loss is None:
            return None
        names = {call.target: None for call in segment.calls if call.function is None}
        found = [self._layer_loss(self._model.get_submodule(name)) for name in names]
        parts = [each for each in found if each is not None]
        return torch.stack(parts).sum() if parts else None

    def backward(self, micro_batch: int, gradients: list[torch.Tensor], factor: float) -> list[torch.Tensor]:
        """Accumulate the gradients of parameters; return those of what was received. `factor`: of the loss."""
        kept = self._passes.pop(micro_batch)
        roots, at_roots = _roots(kept, gradients, factor)
        if roots:
            torch.autograd.backward(roots, at_roots)
        return [_or_zeros(kept, number, leaf.grad) for number, leaf in kept.received.items()]

    def backward_inputs(
        self, micro_batch: int, gradients: list[torch.Tensor], factor: float
    ) -> list[torch.Tensor]:
        """Return the gradients of what was received; `backward_weights` does the rest."""
        kept = self._passes.pop(micro_batch)
        roots, at_roots = _roots(kept, gradients, factor)
        if not kept.received or not roots:
            # No other stage waits for gradients of inputs: all of it is done with the weights.
            self._weights[micro_batch] = partial(torch.autograd.backward, roots, at_roots) if roots else _nothing
            return [_or_zeros(kept, number, None) for number in kept.received]
        found, part = backward_inputs(roots, at_roots, list(kept.received.values()))
        self._weights[micro_batch] = part.run
        return [_or_zeros(kept, number, each) for number, each in zip(kept.received, found, strict=True)]

    def backward_weights(self, micro_batch: int) -> None:
        """Accumulate the gradients of parameters."""
        self._weights.pop(micro_batch)()


def _run(segment: Segment, model: nn.Module, values: dict[int, torch.Tensor]) -> Any:
    """Run `segment` as `run_segment` does; of a sharded model inside its call, which gathers its parameters."""
    if not isinstance(model, FSDPModule):
        return run_segment(segment, model, values)
    numbers = list(values)

    def forward(*tensors: torch.Tensor) -> tuple[Any, dict[int, torch.Tensor]]:
        inner = dict(zip(numbers, tensors, strict=True))
        output = run_segment(segment, model, inner)
        return output, {number: inner[number] for number in segment.sends}

    before = vars(model).get("forward")
    vars(model)["forward"] = forward
    try:
        output, sent = model(*values.values())
    finally:
        del vars(model)["forward"]
        if before is not None:
            vars(model)["forward"] = before
    values.update(sent)
    return output


def require_loss(loss: Any, *, trains: bool) -> torch.Tensor:
    """Return `loss`; raise `ConfigError` unless it is a number with gradients."""
    if not isinstance(loss, torch.Tensor):
        raise ConfigError(
            f"fd.step: the loss function returned a {type(loss).__name__}",
            remedy="return a tensor with one element, the mean over the samples",
        )
    if loss.numel() != 1 or not loss.is_floating_point():
        raise ConfigError(
            f"fd.step: the loss function returned a tensor of shape {list(loss.shape)} and {loss.dtype}",
            remedy="return a tensor with one element, the mean over the samples: loss.mean()",
        )
    if trains and not loss.requires_grad:
        raise ConfigError(
            "fd.step: the loss has no gradients", remedy="let it depend on the model, without detach() or item()"
        )
    return loss.reshape(())


def _roots(
    kept: _StagePass, gradients: list[torch.Tensor], factor: float
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the values to begin the backward pass at, and their gradients."""
    losses = [root for number, root in kept.roots.items() if number < 0]
    sent = [root for number, root in kept.roots.items() if number >= 0]
    pairs = [*zip(sent, gradients, strict=True), *((each, torch.full_like(each, factor)) for each in losses)]
    pairs = [(root, gradient) for root, gradient in pairs if root.requires_grad]
    return [root for root, _ in pairs], [gradient for _, gradient in pairs]


def _or_zeros(kept: _StagePass, number: int, gradient: torch.Tensor | None) -> torch.Tensor:
    return torch.zeros_like(kept.received[number]) if gradient is None else gradient.contiguous()


def _nothing() -> None:
    """No value of the stage has a gradient."""
