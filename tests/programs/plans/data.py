"""The samples of a program: what a rank has of a batch, and how they count in the loss."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from .program import BATCH, TOKENS, Layout, PlanProgram

IGNORED = -100


class Part(NamedTuple):
    """Samples: of a rank, or of one process's pass."""

    tokens: torch.Tensor
    places: torch.Tensor
    targets: torch.Tensor

    def inputs(self, program: PlanProgram) -> tuple[torch.Tensor, ...]:
        """Return what the model is called with."""
        return (self.tokens, self.places) if program.places == "input" else (self.tokens,)


_SHORT = 3
"""Samples that the last batch of a loader lacks."""


def batch(program: PlanProgram, step: int, number: int) -> Part:
    """Return the batch of all ranks: of a step, and of a backward pass in it."""
    whole = _batch(program, step, number)
    is_last = program.loader and (step, number) == (program.steps - 1, program.passes - 1)
    return Part(*(each[:-_SHORT] for each in whole)) if is_last else whole


def loader(program: PlanProgram, layout: Layout) -> Any:
    """Return a loader of all samples, with batches of one rank, for `fd.shard`."""
    number = next(number for number, each in enumerate(program.layouts) if each is layout)  # both may be equal
    first, last = program.span(number)
    parts = [batch(program, step, number) for step in range(first, last) for number in range(program.passes)]
    joined = [torch.cat(each) for each in zip(*parts, strict=True)]
    return DataLoader(TensorDataset(*joined), batch_size=BATCH // layout.samples)


def _batch(program: PlanProgram, step: int, number: int) -> Part:
    draw = torch.Generator().manual_seed(1000 * program.seed + 10 * step + number)
    drawn = torch.randint(0, program.words, (BATCH, TOKENS + 1), generator=draw)
    tokens, targets = drawn[:, :-1].contiguous(), drawn[:, 1:].clone()
    if program.loss in ("ignore", "smooth"):
        lengths = torch.randint(1, TOKENS + 1, (BATCH,), generator=draw)
        targets[torch.arange(TOKENS)[None] >= lengths[:, None]] = IGNORED
    return Part(tokens, torch.arange(TOKENS).expand(BATCH, TOKENS), targets)


def sizes(program: PlanProgram, layout: Layout, step: int) -> list[int]:
    """Return how many samples each rank with samples of its own has."""
    each, parts = BATCH // layout.samples, micro_batches(program, layout)
    found = [each] * layout.samples
    if program.ragged and layout.samples > 1 and each > parts:
        less, more = random.Random(program.seed * 77 + step).sample(range(layout.samples), 2)
        found[less] -= parts
        found[more] += parts
    return found


def micro_batches(program: PlanProgram, layout: Layout) -> int:
    """Return the parts into which `fd.step` divides a rank's samples."""
    return int(layout.keys.get("micro_batches", 1)) if program.loop == "step" else 1


def of_rank(program: PlanProgram, layout: Layout, step: int, number: int, rank: int) -> Part:
    """Return what one rank has, by its number among those with samples of their own."""
    first = sum(sizes(program, layout, step)[:rank])
    last = first + sizes(program, layout, step)[rank]
    return Part(*(each[first:last].contiguous() for each in batch(program, step, number)))


def of_all(program: PlanProgram, layout: Layout, step: int, number: int) -> list[Part]:
    """Return what one process trains on: for each micro-batch, that of all ranks joined."""
    parts = micro_batches(program, layout)
    ranks = [of_rank(program, layout, step, number, rank) for rank in range(layout.samples)]
    pieces = [[each.chunk(parts) for each in rank] for rank in ranks]
    return [
        Part(*(torch.cat([rank[which][micro] for rank in pieces]) for which in range(3))) for micro in range(parts)
    ]


def class_weights(program: PlanProgram) -> torch.Tensor:
    """Return the weights of the loss "classes"."""
    return torch.linspace(0.5, 2.0, program.words, dtype=torch.float32 if program.single else torch.float64)


def loss_of(program: PlanProgram) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the loss function."""

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits, targets = logits.flatten(0, 1), targets.flatten()
        if program.loss == "smooth":
            return functional.cross_entropy(logits, targets, label_smoothing=0.1)
        if program.loss == "classes":
            return functional.cross_entropy(logits, targets, class_weights(program))
        found = functional.cross_entropy(logits, targets)
        return found + 0.01 * logits.logsumexp(-1).square().mean() if program.loss == "logits" else found

    return loss


def count_of(program: PlanProgram) -> Callable[[torch.Tensor], torch.Tensor | int] | None:
    """Return what the loss is a mean over, where that is not samples."""
    if program.loss in ("ignore", "smooth"):
        return lambda targets: (targets != IGNORED).sum()
    if program.loss == "classes":
        return lambda targets: class_weights(program)[targets].sum()
    return (lambda targets: targets.numel()) if program.ragged else None
