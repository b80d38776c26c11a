"""Attention over a sequence that is divided over ranks: for the time of attention, heads are divided instead.

[Note: by heads] An all-to-all turns all heads of some tokens into some heads of all tokens; after attention
another one turns the output back (Jacobs et al. 2023, "DeepSpeed Ulysses", section 3). Queries, keys and values
travel as one message. With c ranks, n tokens a rank, h heads of queries and k of keys, and elements of w bytes, a
rank sends (c - 1) / c batch n width (h + 2 k) w bytes in one message and (c - 1) / c batch n width h w bytes in
another, forward, and the same backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .group import ContextGroup, cut, join


def to_heads(group: ContextGroup, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return, of tensors (batch, heads, tokens of this rank, width), (batch, heads / c, all tokens, width)."""
    made: tuple[torch.Tensor, ...] = _ToHeads.apply(group, *tensors)
    return made


def to_tokens(group: ContextGroup, tensor: torch.Tensor) -> torch.Tensor:
    """Return, of a tensor (batch, heads / c, all tokens, width), (batch, heads, tokens of this rank, width)."""
    made: torch.Tensor = _ToTokens.apply(group, tensor)
    return made


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ContextGroup, *tensors: torch.Tensor) -> Any:
        ctx.group = group
        return tuple(_divide_heads(group, tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, *_divide_tokens(ctx.group, grads)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ContextGroup, tensor: torch.Tensor) -> Any:
        ctx.group = group
        return _divide_tokens(group, [tensor])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, _divide_heads(ctx.group, [grad])[0]


def _divide_heads(group: ContextGroup, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    pieces = [tensor.chunk(group.size, 1) for tensor in tensors]
    received = _exchange(group, pieces)
    return [join(parts, 2) for parts in received]


def _divide_tokens(group: ContextGroup, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    pieces = [[cut(tensor, 2, rank, group.size) for rank in range(group.size)] for tensor in tensors]
    received = _exchange(group, pieces)
    return [torch.cat(parts, 1) for parts in received]


def _exchange(group: ContextGroup, pieces: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Send piece i of each tensor to rank i, in one message; return each tensor's pieces from all ranks."""
    size = group.size
    counts = [each[0].numel() for each in pieces]
    send = torch.cat([each[rank].reshape(-1) for rank in range(size) for each in pieces]).view(size, -1)
    received = group.all_to_all(send)
    begins = [0, *itertools.accumulate(counts)]
    return [
        [received[rank, begin : begin + count].view(each[0].shape) for rank in range(size)]
        for begin, count, each in zip(begins, counts, pieces, strict=False)
    ]
