"""The models of planner.py: a real one, and a virtual one that sleeps instead of computing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from farandole.bench.models.language import TransformerBlock
from models import Sleep, SleepForWeights, mean_square

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


class VirtualBlock(nn.Module):
    """A layer with a gradient to exchange, which sleeps as long as a larger one computes.

    Backward is twice forward: half of it for its input, half for its weights, as of a linear layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(VIRTUAL_WIDTH, VIRTUAL_WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, width)."""
        seconds = SECONDS * x.shape[0] / speed
        weight = SleepForWeights.apply(self.linear.weight, seconds)
        y: torch.Tensor = Sleep.apply(nn.functional.linear(x, weight, self.linear.bias), seconds)
        return y


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


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "language": (Language, language_batch, language_loss),
    "virtual": (virtual_model, virtual_batch, mean_square),
}
"""By name: the model, a batch of so many samples, and the loss of output and targets."""
