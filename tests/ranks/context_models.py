"""Small models with attention, and how one process trains them: the reference of the tests of context parallel."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

import farandole as fd

WORDS, WIDTH = 13, 16


class Attention(nn.Module):
    """Attention with groups of heads, by torch's function."""

    def __init__(self, heads: int, groups: int, is_causal: bool) -> None:
        super().__init__()
        self.heads, self.groups, self.is_causal = heads, groups, is_causal
        self.size = WIDTH // heads
        self.query = nn.Linear(WIDTH, WIDTH)
        self.keys = nn.Linear(WIDTH, 2 * self.size * groups)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        batch, length, _ = x.shape
        query = self.query(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        key, value = self.keys(x).view(batch, length, 2, self.groups, self.size).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=self.is_causal, enable_gqa=self.heads != self.groups
        )
        mixed: torch.Tensor = self.out(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return mixed


class Text(nn.Module):
    """A transformer with learned positions, which come from `fd.context_positions`."""

    def __init__(self, *, heads: int = 4, groups: int = 4, is_causal: bool = True, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Attention(heads, groups, is_causal) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor, padding: torch.Tensor | None = None) -> Any:
        x = self.words(tokens) + self.places(fd.context_positions(tokens.shape[1]))
        mask = None if padding is None else padding[:, None, None]
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = x + torch.tanh(block(norm(x), mask))
        return self.head(x)


def texts(batch: int, length: int, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and targets, int64, of shape (batch, length)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, WORDS, (batch, length), generator=generator)
    return tokens, torch.randint(0, WORDS, (batch, length), generator=generator)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean over the targets that count."""
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
