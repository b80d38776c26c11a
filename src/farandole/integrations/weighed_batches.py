"""Training batches for transformers: each rank's part of each of the job's batches, and what it weighs.

[Note: the weight travels in the batch] A trainer draws batches ahead, skips some on resuming, and moves them
between devices. So what is known of a batch (this rank's samples in it, and their share) is an entry of the batch
itself, which comes from the loader's sampler through the dataset and the collate function.

The data are divided as `fd.shard` divides them (see [Note: how data is divided]). Rank 0 draws the order of an
epoch, as a single process would, and sends it. Whole batches of a batch sampler are dealt to the ranks in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, IterableDataset

from ..comm.world.world import World
from ..core.vocabulary.errors import ConfigError
from ..train.data.drawing import refuse_divided
from ..train.data.partition import Part, Partition
from ..train.data.position import LoopPlace
from ..train.data.rank_sampler import RankBatches, drawn_by_rank_0
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


def divide(loader: DataLoader[Any], sampler: Any, here: World, *, joins_rows: bool = False) -> DataLoader[Any]:
    """Return a loader of this rank's weighed batches of `loader`, whose ``batch_size`` is that of one rank.

    Args:
        loader: that of one process.
        sampler: draws the order of the samples, where `loader` has no batch sampler of its own.
        here: the ranks.
        joins_rows: whether the loss gathers the rows of all ranks, so that their batches must be equally large.

    Raises:
        ConfigError: the batches are a rank's own already, or cannot be equally large.
    """
    arguments = {name: getattr(loader, name) for name in _KEPT}
    joins_rows = joins_rows and here.size > 1
    if loader.batch_size is None:
        source: Any = loader.batch_sampler
        if type(source).__module__.startswith("transformers."):
            raise ConfigError(
                f"the training loader has a {type(source).__name__}, which divides batches over ranks itself",
                remedy="use a train_sampling_strategy that draws samples, such as 'random'",
            )
        refuse_divided(loader, WholeBatches)
        if joins_rows and isinstance(loader.dataset, ConcatDataset):
            raise ConfigError(
                "gather_across_devices=True with several data sets: at the same time ranks have batches of "
                "different sets, whose rows do not belong together",
                remedy="set gather_across_devices=False, or train with one data set",
            )
        arguments["collate_fn"] = _Weigh(loader.collate_fn)
        whole_batches = WholeBatches(source, here, joins_rows=joins_rows)
        return DataLoader(_Weighed(loader.dataset), batch_sampler=whole_batches, **arguments)
    whole = loader.batch_size * here.size
    partition = Partition(here.rank, here.size, whole, drop_last=loader.drop_last)
    if isinstance(loader.dataset, IterableDataset):
        if joins_rows:
            raise ConfigError(
                "gather_across_devices=True with a stream: the last batches of the ranks differ in size",
                remedy="set gather_across_devices=False, or give a data set with a length",
            )
        arguments["collate_fn"] = _WeighStream(divide_stream.collate(loader.collate_fn))
        return DataLoader(_WeighedStream(loader.dataset, partition), batch_size=partition.own_size, **arguments)
    arguments["collate_fn"] = _Weigh(loader.collate_fn)
    batches = PartBatches(sampler, partition, here)
    return DataLoader(_Weighed(loader.dataset), batch_sampler=batches, **arguments)


def joins_rows(loss: Any) -> bool:
    """Return whether a loss of sentence-transformers, or one of a dict of them, gathers the rows of all ranks."""
    losses = loss.values() if isinstance(loss, dict) else [loss]
    modules = (part for each in losses if isinstance(each, torch.nn.Module) for part in each.modules())
    return any(getattr(part, "gather_across_devices", False) is True for part in modules)


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
        order = drawn_by_rank_0(self.sampler, self._world).tolist()
        for part in self._partition.parts(len(order)):
            yield [_Position(order[position], part) for position in part.positions]


class WholeBatches(BatchSampler):
    """Whole batches of `source`, dealt to the ranks in turn as `fd.shard` deals them, each with its weight.

    A round is a batch of each rank. In the last one a rank may have none: it gets the epoch's first batch again,
    as a placeholder. The order of an epoch goes by the seed of the training and the epoch.
    """

    def __init__(self, source: Any, here: World, *, joins_rows: bool = False) -> None:
        self.batch_sampler = source
        self.batch_size = getattr(source, "batch_size", 1)
        self.drop_last = False
        self._joins_rows = joins_rows
        self._partition = Partition(here.rank, here.size, here.size)
        self._batches = RankBatches(source, self._partition, here, torch.initial_seed())
        self._epoch = 0

    @property
    def sampler(self) -> Any:
        """The sampler of `source`, which Accelerate replaces by one that is seeded."""
        return getattr(self.batch_sampler, "sampler", None)

    @sampler.setter
    def sampler(self, value: Any) -> None:
        self.batch_sampler.sampler = value

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration be epoch `epoch`."""
        self._epoch = epoch
        for each in (self.batch_sampler, self.sampler):
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)

    def __len__(self) -> int:
        return self._batches.steps()

    def __iter__(self) -> Iterator[list[Any]]:
        plan = self._batches.make_plan(LoopPlace(self._epoch))
        self._epoch += 1
        if self._joins_rows:
            self._refuse_unequal([len(batch) for batch in plan.order])
        for indexes, step in zip(plan.batches(), plan.steps(), strict=True):
            yield [_Position(index, step.part) for index in indexes]

    def _refuse_unequal(self, sizes: list[int]) -> None:
        ranks = self._partition.size
        if ranks > 1 and (len(set(sizes)) > 1 or len(sizes) % ranks):
            raise ConfigError(
                f"gather_across_devices=True: the epoch has {len(sizes)} batches of {min(sizes)} to {max(sizes)} "
                f"samples, and each of {ranks} ranks must have as many batches of the same size",
                remedy="give a number of samples that is a multiple of ranks x per_device_train_batch_size, for "
                "instance dataset.select(range(n)), or set gather_across_devices=False",
            )


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
