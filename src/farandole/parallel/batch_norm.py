"""BatchNorm over the global batch: every rank normalises with the statistics of all samples.

`synchronise` turns a model's BatchNorm layers into their synchronised kin in place: the class of the
layer changes, its parameters, buffers, names and `isinstance` checks do not. Works on CPU and GPU
(torch's own SyncBatchNorm refuses CPU tensors).

[Note: unequal shares] Statistics are sums over samples divided by the global count, so short batches
are weighted by themselves. In backward the gradients that reach the layer belong to each rank's own
mean loss; they are brought to the global loss's scale by the rank's share before they are mixed, and
back afterwards. See [Note: the true mean] in `comm.share`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..comm.wire import explain
from ..comm.world import World
from ..core.errors import CommError


def synchronise(model: nn.Module, world: World) -> int:
    """Make every BatchNorm layer of `model` use global statistics; return how many there were.

    To be called by all ranks. The statistics travel in a group of their own.
    """
    layers = [module for module in model.modules() if type(module) in _KIN]
    if not layers or world.size == 1:
        return len(layers)
    channel = Channel(world)
    for layer in layers:
        layer.__class__ = _KIN[type(layer)]
        object.__setattr__(layer, "_farandole", channel)
    return len(layers)


def is_synchronised(module: nn.Module) -> bool:
    """Return whether the layer's statistics are global already."""
    return isinstance(module, (Synchronised, nn.SyncBatchNorm))


class Channel:
    """The group in which a model's batch statistics travel, until the world closes."""

    def __init__(
        self, world: World, translate: Callable[[CommError], Exception] = lambda problem: problem
    ) -> None:
        self.world = world
        self._translate = translate
        self._group: dist.ProcessGroup | None = world.new_group()
        world.call_on_close(self.close)

    def close(self) -> None:
        """Let go of the group."""
        self._group = None

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place."""
        operation = "all-reduce of batch statistics"
        if self._group is None:
            problem = CommError("the world was left", rank=self.world.rank, operation=operation)
            raise self._translate(problem)
        try:
            dist.all_reduce(tensor, group=self._group)
        except RuntimeError as failure:
            raise self._translate(explain(failure, self.world, operation)) from None
        return tensor


class Synchronised(_BatchNorm):
    """A BatchNorm layer over the samples of all ranks; `_farandole` is set before its first forward pass."""

    _farandole: Channel

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name for it
        """Normalise, in training by all ranks' statistics."""
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        momentum = self.momentum
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        output, mean, variance, count = _GlobalNorm.apply(input, self.weight, self.bias, self.eps, self._farandole)
        if self.training and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                unbiased = variance * (count / (count - 1).clamp(min=1))
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum or 0.0)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum or 0.0)
        normalised: torch.Tensor = output
        return normalised


class _Synchronised1d(Synchronised, nn.BatchNorm1d):
    pass


class _Synchronised2d(Synchronised, nn.BatchNorm2d):
    pass


class _Synchronised3d(Synchronised, nn.BatchNorm3d):
    pass


_KIN: dict[type[nn.Module], type[Synchronised]] = {
    nn.BatchNorm1d: _Synchronised1d,
    nn.BatchNorm2d: _Synchronised2d,
    nn.BatchNorm3d: _Synchronised3d,
}


class _GlobalNorm(torch.autograd.Function):
    """Normalise over batch and space of all ranks. Ioffe and Szegedy, 2015, algorithms 1 and 2."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any,
        input: torch.Tensor,  # noqa: A002
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        channel: Channel,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(input.dtype, torch.float32)
        x = input.to(wide)
        axes = [0, *range(2, x.dim())]
        present = channel.world.share.factor != 0.0
        sums = torch.cat([x.sum(axes), x.new_full((1,), x.numel() / max(1, x.shape[1]))])
        sums = channel.sum(sums if present else torch.zeros_like(sums))
        count = sums[-1].clamp(min=1)
        mean = sums[:-1] / count
        shape = [1, -1, *[1] * (x.dim() - 2)]
        centred = x - mean.view(shape)
        # Second pass about the mean: a difference of large squares would lose what one process keeps.
        squares = centred.square().sum(axes)
        squares = channel.sum(squares if present else torch.zeros_like(squares))
        variance = squares / count
        inverse = torch.rsqrt(variance + eps)
        normalised = centred * inverse.view(shape)
        output = normalised if weight is None else normalised * weight.to(wide).view(shape)
        if bias is not None:
            output = output + bias.to(wide).view(shape)
        ctx.save_for_backward(normalised, inverse, weight, count)
        ctx.channel, ctx.factor = channel, channel.world.share.factor
        ctx.has_bias = bias is not None
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        normalised, inverse, weight, count = ctx.saved_tensors
        g = grads[0].to(normalised.dtype)
        axes = [0, *range(2, g.dim())]
        shape = [1, -1, *[1] * (g.dim() - 2)]
        sum_g = g.sum(axes)
        sum_gx = (g * normalised).sum(axes)
        own = torch.cat([sum_g, sum_gx])
        # To the scale of the global loss, mixed, and back to this rank's own.
        factor = ctx.factor
        mixed = ctx.channel.sum(own * factor if factor else torch.zeros_like(own))
        mixed = mixed / factor if factor else torch.zeros_like(mixed)
        mean_g, mean_gx = (mixed / count).chunk(2)
        scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
        dx = (g - mean_g.view(shape) - normalised * mean_gx.view(shape)) * scale.view(shape)
        d_weight = sum_gx.to(weight.dtype) if weight is not None else None
        d_bias = sum_g.to(grads[0].dtype if weight is None else weight.dtype) if ctx.has_bias else None
        return dx.to(grads[0].dtype), d_weight, d_bias, None, None
