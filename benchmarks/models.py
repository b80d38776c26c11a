"""What several benchmarks train: small parameters without number, a transformer's block, and layers that sleep.

Layers that sleep instead of computing let more ranks be measured than there are cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

try:
    from farandole.bench.models import LanguageModel, resnet50
except ImportError:  # another version, which `two_versions.py` measures this one beside
    from farandole.bench.models.language import LanguageModel  # type: ignore[no-redef, import-not-found]
    from farandole.bench.models.resnet import resnet50  # type: ignore[no-redef, import-not-found]

Loss = Callable[[nn.Module], torch.Tensor]
"""Of a model, on a fixed batch."""
SMALL_WIDTH = 16
BLOCK_WIDTH, BLOCK_TOKENS, BLOCK_HEADS = 1024, 512, 16
COLUMNS, ROWS = ("query", "key", "value", "up"), ("out", "down")
"""Layers of `Block` that tensor parallelism divides by outputs, and by inputs."""


# Losses and steps.


def next_byte_loss(tokens: torch.Tensor) -> Loss:
    """Return the loss of language models on these bytes (batch, length + 1)."""
    return lambda model: nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def random_bytes(batch: int, length: int, seed: int) -> torch.Tensor:
    """Return bytes (batch, length + 1) for `next_byte_loss`."""
    return torch.randint(0, 256, (batch, length + 1), generator=torch.Generator().manual_seed(seed))


def mean_square_loss(x: torch.Tensor) -> Loss:
    """Return the loss that is the mean square of what a model makes of `x`."""
    return lambda model: model(x).square().mean()


def mean_square(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean square of differences, as `fd.step` asks for it."""
    return (output - targets).square().mean()


def step_of(model: nn.Module, loss_of: Loss, optimizer: torch.optim.Optimizer | None = None) -> Callable[[], None]:
    """Return a step of training; without an optimizer it ends with the backward pass."""

    def step() -> None:
        if optimizer is None:
            model.zero_grad()
        else:
            optimizer.zero_grad()
        loss_of(model).backward()
        if optimizer is not None:
            optimizer.step()

    return step


# Models that compute.


class ManySmall(nn.Module):
    """Very many small parameters, so that the cost of each gradient is all overhead.

    `parameters` tensors of 16 x 16 and 16 numbers; takes and returns (batch, 16).

    The last layer of an odd number has no bias.
    """

    def __init__(self, parameters: int = 2000) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(SMALL_WIDTH, SMALL_WIDTH, bias=i + 1 < parameters) for i in range(0, parameters, 2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add up what each layer makes of the input: wide, so that no gradient vanishes on its way."""
        outputs = [layer(x) for layer in self.layers]
        return torch.stack(outputs).mean(0)


def large_language_model(context: int = 128) -> LanguageModel:
    """Return one of 25.4 million parameters."""
    return LanguageModel(width=512, depth=8, heads=8, context=context)


def build(name: str) -> tuple[Callable[[], nn.Module], Loss]:
    """Return how to make the model, and its loss on a fixed input of this rank."""
    if name == "lm":
        tokens = random_bytes(16, 128, dist.get_rank())
        return lambda: LanguageModel(width=128, depth=4, heads=4, context=128), next_byte_loss(tokens)
    generator = torch.Generator().manual_seed(dist.get_rank())
    if name == "resnet50":
        images = torch.randn(4, 3, 160, 160, generator=generator)
        labels = torch.randint(0, 1000, (4,), generator=generator)
        return resnet50, lambda model: nn.functional.cross_entropy(model(images), labels)
    return lambda: ManySmall(2000), mean_square_loss(torch.randn(8, SMALL_WIDTH, generator=generator))


class Block(nn.Module):
    """Attention and a two-layer perceptron; `heads` are those of this rank."""

    def __init__(self, heads: int, *, norms: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(BLOCK_WIDTH) if norms else nn.Identity() for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(BLOCK_WIDTH, BLOCK_WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(BLOCK_WIDTH, 4 * BLOCK_WIDTH), nn.Linear(4 * BLOCK_WIDTH, BLOCK_WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, tokens, width)."""
        normed = self.norms[0](x)
        query, key, value = (
            part(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))
        return out


def stock_block(group: Any, *, norms: bool) -> nn.Module:
    """Return a block that torch's own tensor parallelism has divided over a group."""
    torch.manual_seed(0)
    plan: Any = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
    block = Block(BLOCK_HEADS // group.size(), norms=norms)
    return parallelize_module(block, DeviceMesh.from_group(group, "cpu"), plan)


# Layers that sleep.


class Sleep(torch.autograd.Function):
    """The identity: sleeps so many seconds in forward, and in backward, for the gradient of its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        """Sleep."""
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Sleep."""
        time.sleep(ctx.seconds)
        return gradients[0], None


class SleepForWeights(torch.autograd.Function):
    """The identity on a weight: sleeps so many seconds in backward, where gradients of weights are computed."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        """Do nothing."""
        ctx.seconds = seconds
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Sleep."""
        time.sleep(ctx.seconds)
        return gradients[0], None


class _SleepOnce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, seconds: float
    ) -> torch.Tensor:
        ctx.seconds, ctx.gradient = seconds, gradient
        time.sleep(seconds)
        return x + 0.0

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(2 * ctx.seconds)
        return gradients[0], ctx.gradient, None, None


class SleepingLayer(nn.Module):
    """A weight whose arithmetic is sleep, `seconds` forward and twice as long backward, and its gradient."""

    def __init__(self, weight: torch.Tensor, gradient: torch.Tensor, seconds: float) -> None:
        super().__init__()
        self.weight, self.gradient, self.seconds = nn.Parameter(weight), gradient, seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return the same shape."""
        out: torch.Tensor = _SleepOnce.apply(x, self.weight, self.gradient, self.seconds)
        return out
