"""Dividing a stream (an IterableDataset): every rank reads it and keeps its own part of each batch.

The length is not known before the end, so what the reducer must know of a batch travels with it,
out of the worker process, as `ShardedBatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from .partition import Part, Partition


class _Sample(NamedTuple):
    value: Any
    part: Part


class ShardedBatch(NamedTuple):
    """A collated batch with what is known of it."""

    batch: Any
    part: Part


class divide_stream(IterableDataset[_Sample]):  # noqa: N801 - used as a function
    """This rank's samples of the stream `source`, batch by batch."""

    def __init__(self, source: IterableDataset[Any], partition: Partition) -> None:
        super().__init__()
        self.source = source
        self._partition = partition

    def __iter__(self) -> Iterator[_Sample]:
        samples = iter(self.source)
        first: list[Any] = []
        while True:
            batch = list(islice(samples, self._partition.whole))
            if not batch or (len(batch) < self._partition.whole and self._partition.drop_last):
                return
            first = first or batch[:1]
            part = self._partition.part(0, len(batch))
            if part is not None:
                values = [batch[i] for i in part.positions] if part.samples else first
                for value in values:
                    yield _Sample(value, part)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "source":
            raise AttributeError(name)
        return getattr(self.source, name)  # set_epoch, for one

    def __len__(self) -> int:
        """Samples on this rank, placeholders included; a TypeError when the stream has no length."""
        total = len(self.source)  # type: ignore[arg-type]
        return sum(len(part.positions) for part in self._partition.parts(total))

    @staticmethod
    def collate(collate_fn: Callable[[list[Any]], Any]) -> Callable[[list[_Sample]], ShardedBatch]:
        """Return a collate function that keeps what is known of the batch beside it."""
        return _Collate(collate_fn)


class _Collate:
    """A class, so that it reaches workers that are not forked."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        self._collate_fn = collate_fn

    def __call__(self, samples: list[_Sample]) -> ShardedBatch:
        return ShardedBatch(self._collate_fn([sample.value for sample in samples]), samples[0].part)
