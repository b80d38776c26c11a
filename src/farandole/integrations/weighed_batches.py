"""Training batches for transformers: each rank's part of each of the job's batches, and what it weighs.

[Note: the weight travels in the batch] A trainer draws batches ahead, skips some on resuming, and moves them
between devices. So what is known of a batch (this rank's samples in it, and their share) is an entry of the batch
itself, which comes from the loader's sampler through the dataset and the collate function.

The data are divided as `fd.shard` divides them (see [Note: how data is divided]). Rank 0 draws the order of an
epoch, as a single process would, and sends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, NamedTuple, cast

from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

from ..comm.world.world import World
from ..core.vocabulary.errors import ConfigError
from ..train.data.partition import Part, Partition
from ..train.data.rank_sampler import drawn_by_rank_0
from ..train.data.stream import ShardedBatch, divide_stream

WEIGHT = "farandole_weight"
"""The entry of a batch."""


class Weight(NamedTuple):
    """What is known of a batch."""

    samples: int
    """This rank's; 0: a placeholder, which counts for nothing."""
    share: float
    """This rank's part of the samples of all ranks, over the mean part."""


def take_weight(batch: Any) -> Weight | None:
    """Take the weight out of a batch; None where there is none."""
    return Weight(*batch.pop(WEIGHT)) if isinstance(batch, MutableMapping) and WEIGHT in batch else None


def peek_weight(batch: Any) -> Weight | None:
    """Return the weight of a batch; None where there is none."""
    return Weight(*batch[WEIGHT]) if isinstance(batch, MutableMapping) and WEIGHT in batch else None


def divide(loader: DataLoader[Any], sampler: Any, here: World) -> DataLoader[Any]:
    """Return a loader of this rank's weighed batches of `loader`, whose ``batch_size`` is that of one rank.

    `sampler` draws the order of the samples.
    """
    arguments = {name: getattr(loader, name) for name in _KEPT}
    if loader.batch_size is None:
        theirs = type(loader.batch_sampler)
        raise ConfigError(
            f"the training loader has a {theirs.__name__} of whole batches, expected a sampler of samples",
            remedy="use a train_sampling_strategy that draws samples, such as 'random'"
            if theirs.__module__.startswith("transformers.")
            else _OF_ANOTHER_PACKAGE,
        )
    whole = loader.batch_size * here.size
    partition = Partition(here.rank, here.size, whole, drop_last=loader.drop_last)
    if isinstance(loader.dataset, IterableDataset):
        arguments["collate_fn"] = _WeighStream(divide_stream.collate(loader.collate_fn))
        return DataLoader(_WeighedStream(loader.dataset, partition), batch_size=partition.own_size, **arguments)
    arguments["collate_fn"] = _Weigh(loader.collate_fn)
    batches = PartBatches(sampler, partition, here)
    return DataLoader(_Weighed(loader.dataset), batch_sampler=batches, **arguments)


_OF_ANOTHER_PACKAGE = (
    "train with this package's own Trainer, which DDP distributes, and give it callbacks=[FarandoleCallback()], "
    "which records the run; or return a loader with batch_size from its get_train_dataloader"
)
"""For a Trainer that always makes its batches itself, such as that of sentence-transformers."""

_KEPT = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
    "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order",
)  # fmt: skip


class PartBatches(BatchSampler):
    """This rank's part of each of the job's batches, as positions that know their part."""

    def __init__(self, sampler: Any, partition: Partition, here: World) -> None:
        super().__init__(sampler, max(partition.own_size, 1), partition.drop_last)
        self._partition = partition
        self._world = here

    def __len__(self) -> int:
        return self._partition.steps(len(cast("Any", self.sampler)))

    def __iter__(self) -> Iterator[list[Any]]:
        order = drawn_by_rank_0(self.sampler, self._world)
        for part in self._partition.parts(len(order)):
            yield [_Position(order[position], part) for position in part.positions]


class _Position(NamedTuple):
    sample: int
    part: Part


class _WeighedSample(NamedTuple):
    value: Any
    part: Part


class _Weighed(Dataset[_WeighedSample]):
    """Samples beside the part that they were drawn for."""

    def __init__(self, source: Any) -> None:
        self.source = source
        if hasattr(source, "__getitems__"):
            self.__getitems__ = self._several

    def __getitem__(self, position: _Position) -> _WeighedSample:
        return _WeighedSample(self.source[position.sample], position.part)

    def _several(self, positions: list[_Position]) -> list[_WeighedSample]:
        values = self.source.__getitems__([position.sample for position in positions])
        return [_WeighedSample(value, position.part) for value, position in zip(values, positions, strict=True)]

    def __len__(self) -> int:
        return len(self.source)

    def set_epoch(self, epoch: int) -> None:
        """Tell the data set, if it wants to know."""
        _set_epoch(self.source, epoch)


class _WeighedStream(divide_stream):
    def set_epoch(self, epoch: int) -> None:
        """Tell the stream, if it wants to know."""
        _set_epoch(self.source, epoch)


def _set_epoch(source: Any, epoch: int) -> None:
    if hasattr(source, "set_epoch"):
        source.set_epoch(epoch)


class _Weigh:
    """A collate function, in a class so that it reaches workers that are not forked."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        self._collate_fn = collate_fn

    def __call__(self, samples: list[_WeighedSample]) -> Any:
        return _with_weight(self._collate_fn([sample.value for sample in samples]), samples[0].part)


class _WeighStream:
    def __init__(self, collate: Callable[[list[Any]], ShardedBatch]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        found = self._collate(samples)
        return _with_weight(found.batch, found.part)


def _with_weight(batch: Any, part: Part) -> Any:
    if not isinstance(batch, MutableMapping):
        raise ConfigError(
            f"the data collator returned a {type(batch).__name__}, expected a dict: the model's arguments"
        )
    batch[WEIGHT] = (part.samples, part.factor)
    return batch
