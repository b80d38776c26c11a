"""The models of planner.py: a real one, and a virtual one that sleeps instead of computing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from farandole.bench.models.language import TransformerBlock

TOKENS, WIDTH, DEPTH, HEADS, VOCABULARY = 64, 192, 4, 6, 256
VIRTUAL_WIDTH, VIRTUAL_BLOCKS = 512, 8
SECONDS = 0.002
"""What a virtual block sleeps for a sample in forward, for its input in backward, and for its weights."""
speed = 1.0
"""Speed of this rank's sleep."""


class Language(nn.Module):
    """Predicts the next byte, without positions: ranks of a context group have other tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(TransformerBlock(WIDTH, HEADS) for _ in range(DEPTH))
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Take bytes (batch, length), return logits (batch, length, vocabulary)."""
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.output(x)
        return logits


class _Sleep(torch.autograd.Function):
    """The identity: sleeps in forward, and as long in backward, where the gradient of its input is computed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.samples = x.shape[0]
        time.sleep(SECONDS * ctx.samples / speed)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(SECONDS * ctx.samples / speed)
        return gradients[0]


class _SleepForWeights(torch.autograd.Function):
    """The identity on a weight: sleeps in backward, where a gradient of weights is computed."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, samples: int) -> torch.Tensor:
        ctx.samples = samples
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(SECONDS * ctx.samples / speed)
        return gradients[0], None


class VirtualBlock(nn.Module):
    """A layer with a gradient to exchange, which sleeps as long as a larger one computes.

    Backward is twice forward: half of it for its input, half for its weights, as of a linear layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(VIRTUAL_WIDTH, VIRTUAL_WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, width)."""
        weight = _SleepForWeights.apply(self.linear.weight, x.shape[0])
        y: torch.Tensor = _Sleep.apply(nn.functional.linear(x, weight, self.linear.bias))
        return y


def language_model() -> nn.Module:
    """Return the real model."""
    return Language()


def language_batch(samples: int = 4) -> torch.Tensor:
    """Return tokens."""
    return torch.zeros(samples, TOKENS, dtype=torch.int64)


def virtual_model() -> nn.Module:
    """Return the model that sleeps."""
    return nn.Sequential(*[VirtualBlock() for _ in range(VIRTUAL_BLOCKS)])


def virtual_batch(samples: int = 4) -> torch.Tensor:
    """Return an input that needs a gradient: all blocks are alike."""
    return torch.ones(samples, VIRTUAL_WIDTH, dtype=torch.float32).requires_grad_()


def language_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def virtual_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean square."""
    return (output - targets).square().mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "language": (language_model, language_batch, language_loss),
    "virtual": (virtual_model, virtual_batch, virtual_loss),
}
"""By name: the model, a batch of so many samples, and the loss of output and targets."""
