"""Length buckets: batches of samples of about equal length, the same bucket on all ranks in each step.

[Note: length buckets] A batch is padded to its longest sample, so samples of about equal length waste least, and
ranks whose samples are of about equal length take equally long. The order of an epoch is cut into pools of 50 of
the job's batches. A pool is sorted by length and cut into batches. Then the batches of all pools are shuffled, and
the samples within each batch, so that a rank's part of it is no shorter than another's. The batch with the longest
sample comes first: memory that does not suffice is noticed in the first step. The remainder, where the number of
samples is no multiple of the batch, comes last: samples from anywhere in the order, not the shortest ones.

With a budget of tokens a batch takes, on each rank, as many samples as fit when all are padded to its longest.

This file is pure: an order and a seed go in, another order comes out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ...core.vocabulary.errors import ConfigError

POOL_BATCHES = 50
LEAST_POOLS = 2
"""At least so many, for a small dataset: one pool would put the same samples together in each epoch."""


class Cut(NamedTuple):
    """How an order is cut into the job's batches."""

    multiple: int
    """Samples of a batch; with a budget of tokens, what this is a multiple of."""
    tokens: int
    """Padded tokens of one sample of each `multiple` at most; 0: batches of `multiple` samples."""


class Arranged(NamedTuple):
    """An order of samples in buckets."""

    order: torch.Tensor
    sizes: list[int] | None
    """Samples of each of the job's batches, where these differ."""


@dataclass(frozen=True)
class LengthBuckets:
    """Arranges orders of one dataset by the lengths of its samples."""

    lengths: torch.Tensor
    cut: Cut
    is_sorted: bool = False
    """Sort all samples, longest first, and shuffle nothing: for evaluation."""

    def __post_init__(self) -> None:
        tokens = self.cut.tokens
        if tokens and len(self.lengths) and int(self.lengths.max()) > tokens:
            index = int(self.lengths.argmax())
            raise ConfigError(
                f"shard: sample {index} has {int(self.lengths[index])} tokens, more than a batch of max_tokens="
                f"{tokens} on one rank holds",
                remedy="raise max_tokens, or truncate the samples or leave the longest out",
            )

    def arrange(self, order: torch.Tensor, seed: int, cut: Cut | None = None) -> Arranged:
        """Return the samples of `order` in buckets, for this cut or another one."""
        multiple, tokens = cut = cut or self.cut
        if self.is_sorted:
            order = order[self.lengths[order].argsort(descending=True, stable=True)]
        rest = len(order) % multiple
        body, tail = order[: len(order) - rest], order[len(order) - rest :]
        if not len(body):
            return Arranged(order, [len(tail)] * bool(rest) if tokens else None)
        if self.is_sorted:
            sizes = _sizes(self.lengths[body].numpy(), cut)
        else:
            body, sizes = self._shuffled(body, cut, torch.Generator().manual_seed(seed))
        arranged = torch.cat([body, tail])
        return Arranged(arranged, [*sizes.tolist(), *[rest] * bool(rest)] if tokens else None)

    def _shuffled(
        self, body: torch.Tensor, cut: Cut, generator: torch.Generator
    ) -> tuple[torch.Tensor, np.ndarray]:
        pool_samples = self._pool_samples(len(body), cut)
        pools = torch.arange(len(body)) // pool_samples
        lengths = self.lengths[body]
        body = body[
            (pools * (int(lengths.max()) + 1) - lengths).argsort(stable=True)
        ]  # longest first in each pool
        lengths = self.lengths[body]
        pieces = [_sizes(pool.numpy(), cut) for pool in lengths.split(pool_samples)]
        sizes = torch.from_numpy(np.concatenate(pieces))
        batch_of = torch.arange(len(sizes)).repeat_interleave(sizes)
        places = torch.empty(len(sizes), dtype=torch.int64)
        places[torch.randperm(len(sizes), generator=generator)] = torch.arange(len(sizes))
        longest = int(batch_of[int(lengths.argmax())])
        places[places == 0], places[longest] = int(places[longest]), 0
        mixed = torch.randperm(len(body), generator=generator)
        order = mixed[places[batch_of[mixed]].argsort(stable=True)]
        return body[order], sizes[places.argsort()].numpy()

    def _pool_samples(self, count: int, cut: Cut) -> int:
        batch = cut.multiple
        if cut.tokens:
            mean = max(float(self.lengths.double().mean()), 1.0)
            batch *= max(int(cut.tokens / mean), 1)
        return batch * max(min(POOL_BATCHES, count // (batch * LEAST_POOLS)), 1)


def _sizes(longest_first: np.ndarray, cut: Cut) -> np.ndarray:
    """Return the sizes of the batches into which samples of these lengths are cut."""
    total = len(longest_first)
    if not cut.tokens:
        return np.full(total // cut.multiple, cut.multiple)
    sizes: list[int] = []
    begin = 0
    while begin < total:
        fit = cut.tokens // max(int(longest_first[begin]), 1)
        sizes.append(min(max(fit, 1) * cut.multiple, total - begin))
        begin += sizes[-1]
    return np.array(sizes)
