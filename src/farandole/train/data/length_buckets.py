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

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from ...core.vocabulary.errors import ConfigError

# The lengths of a dataset's samples, as ``fd.shard(lengths=...)`` takes them: a list, a function or a column.

Lengths = Sequence[int] | np.ndarray[Any, Any] | torch.Tensor | Callable[[int], int] | str

_REMEDY = "give the number of tokens of each sample of the dataset, in its order"


def agreed_lengths(
    loader: DataLoader[Any], lengths: Lengths | None, max_tokens: int | None
) -> tuple[torch.Tensor | None, ConfigError | None]:
    """Return the lengths for `loader`, and what is wrong with them: to be raised when all ranks have it."""
    try:
        _refuse_unfit(loader, lengths, max_tokens)
        return (None if lengths is None else read_lengths(lengths, loader.dataset)), None
    except ConfigError as problem:
        return None, problem


def _refuse_unfit(loader: DataLoader[Any], lengths: Lengths | None, max_tokens: int | None) -> None:
    """Raise `ConfigError` for a loader whose batches cannot go by lengths."""
    if max_tokens is not None:
        if lengths is None:
            raise ConfigError(f"shard: max_tokens={max_tokens} without lengths", remedy="give lengths=, too")
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
            raise ConfigError(f"shard: max_tokens is {max_tokens!r}, expected a whole number of 1 or more")
    if lengths is None:
        return
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            f"shard: lengths for a stream ({type(loader.dataset).__name__}), whose samples have no index",
            remedy="use a dataset with __getitem__, or sort a buffer of the stream by length in the stream itself",
        )
    if loader.batch_size is None:
        raise ConfigError(
            f"shard: lengths for a loader with a batch_sampler ({type(loader.batch_sampler).__name__}), "
            "which makes the batches already",
            remedy="give the DataLoader batch_size= and shuffle=True instead of batch_sampler=",
        )
    if max_tokens is not None and loader.batch_size != 1:
        raise ConfigError(
            f"shard: batch_size={loader.batch_size} and max_tokens={max_tokens} both say how large a batch is",
            remedy="leave batch_size out of the DataLoader, or max_tokens out of fd.shard",
        )
    if max_tokens is not None and not (
        is_permutation(loader.sampler) or type(loader.sampler) is SequentialSampler
    ):
        raise ConfigError(
            f"shard: max_tokens with a {type(loader.sampler).__name__}: the number of batches is not known before "
            "it draws",
            remedy="use shuffle=True, or batch_size instead of max_tokens",
        )


def is_permutation(source: Any) -> bool:
    """Return whether torch's sampler draws each sample once: what ``shuffle=True`` makes."""
    return isinstance(source, RandomSampler) and not source.replacement and source._num_samples is None


def read_lengths(lengths: Lengths, dataset: Any) -> torch.Tensor:
    """Return the length of each sample of `dataset`; raise `ConfigError` for what are no lengths."""
    total = len(dataset)
    values: Any = lengths
    if isinstance(lengths, str):
        values = _column(lengths, dataset)
    elif callable(lengths):
        values = [lengths(index) for index in range(total)]
    elif isinstance(lengths, torch.Tensor):
        values = lengths.detach().cpu().numpy()
    try:
        count = len(values)
    except TypeError:
        raise ConfigError(
            f"shard: lengths is a {type(lengths).__name__}, expected numbers, a function or the name of a column",
            remedy=_REMEDY,
        ) from None
    if count != total:
        raise ConfigError(f"shard: {count} lengths for a dataset of {total} samples", remedy=_REMEDY)
    return torch.from_numpy(_whole_numbers(values).copy())


def digest_of(values: torch.Tensor) -> int:
    """Return a number that other values do not have, small enough for any reader of JSON."""
    return int.from_bytes(hashlib.blake2b(values.numpy().tobytes(), digest_size=6).digest(), "big")


def _column(name: str, dataset: Any) -> Any:
    try:
        column = dataset[name]
    except Exception as problem:  # what a dataset raises for a wrong key is its own matter
        raise ConfigError(
            f"shard: the {type(dataset).__name__} has no column {name!r} for lengths "
            f"({type(problem).__name__}: {str(problem)[:80]})",
            remedy="give a list of lengths, or a function of the index",
        ) from None
    if len(column) and not isinstance(column[0], (int, float, np.number)) and hasattr(column[0], "__len__"):
        return [len(each) for each in column]
    return column if isinstance(column, np.ndarray) else list(column)


def _whole_numbers(values: Any) -> np.ndarray[Any, Any]:
    try:
        array = np.asarray(values)
    except ValueError:  # a nest of lists of different lengths
        array = np.empty(0, dtype=object)
    if array.ndim == 1 and array.dtype.kind in "iu" and not (len(array) and int(array.min()) < 0):
        return array.astype(np.int64)
    for index, value in enumerate(values):
        if not _is_length(value):
            raise ConfigError(
                f"shard: the length of sample {index} is {str(value)[:80]}, expected a whole number of 0 or more",
                remedy=_REMEDY,
            )
    return np.fromiter((int(value) for value in values), dtype=np.int64, count=len(values))


def _is_length(value: Any) -> bool:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.number)):
        return False
    return 0 <= float(value) < 2**53 and float(value).is_integer()


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
