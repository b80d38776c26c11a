"""Models that profiles are made of in tests."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import farandole as fd

WORDS, WIDTH, HEADS, TOKENS = 96, 64, 4, 16


class Block(nn.Module):
    """A layer of a Llama-like transformer, with attention by torch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (samples, tokens, features)."""
        q, k, v = (
            each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return out


class Language(nn.Module):
    """An embedding, blocks, and an output layer that may be tied to the embedding."""

    def __init__(self, *, tied: bool, blocks: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(blocks)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Take (samples, tokens), return logits."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


def next_word(logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """Return a loss of logits."""
    return functional.cross_entropy(logits.flatten(0, 1), batch.flatten())


def words(samples: int) -> torch.Tensor:
    """Return a batch of tokens."""
    return torch.zeros(samples, TOKENS, dtype=torch.int64)


def mlp() -> nn.Sequential:
    """Return four linear layers of which the middle ones are equal, and no blocks."""
    return nn.Sequential(
        nn.Linear(64, 80), nn.ReLU(), nn.Linear(80, 80), nn.ReLU(), nn.Linear(80, 80), nn.ReLU(), nn.Linear(80, 10)
    )  # fmt: skip


class Experts(nn.Module):
    """Blocks with experts: tokens are routed by values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.ModuleDict(
                    {"norm": nn.LayerNorm(32), "experts": fd.MixtureOfExperts(32, 48, num_experts=4, top_k=2)}
                )
                for _ in range(2)
            ]
        )
        self.head = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take (samples, tokens, features)."""
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleDict), "made above"
            x = x + layer["experts"](layer["norm"](x))
        out: torch.Tensor = self.head(x)
        return out


class ReadsValues(nn.Module):
    """Decides by what is in a tensor."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take (samples, features)."""
        x = self.one(x)
        if x.sum().item() > -1e9:
            x = self.two(x)
        return x


class Patches(nn.Module):
    """A vision transformer in small: a token of its own, positions, and code between the parts."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH, dtype=torch.float32))
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Take (samples, 3, 16, 16)."""
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(self.frozen(x).mean(1))
        return out
