"""`fd.shard`: each rank's share of a loader's batches, so that no sample is lost or doubled.

[Note: how data is divided] Batch i of the job is a run of the epoch's order, the same for every number
of ranks; rank r takes its contiguous part of it. The last batch may be short: it is divided as evenly
as it can be. When it holds fewer samples than there are ranks, a rank without one gets the epoch's
first sample again as a *placeholder*, so that its loop makes the same number of steps; it counts for
nothing (see [Note: the true mean]). In evaluation nobody gets a placeholder.

The order of an epoch is a pure function of (seed, epoch) for the ordinary random sampler, and rank
0's draw, sent to all, for a sampler of the user's own.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from ..comm.agree import gather
from ..comm.world import World, world
from ..core.errors import ConfigError
from ..core.events import DataWait
from .division import Division, Part
from .loader_watch import leave_out
from .stream import Fed, divide_stream

T = TypeVar("T")


def shard(
    loader: DataLoader[T], *, split: bool = False, evaluate: bool = False, seed: int | None = None
) -> ShardedLoader:
    """Return a loader of this rank's share of `loader`'s batches.

    `loader.batch_size` is what one rank takes (the job's batch grows with the ranks), or with
    ``split=True`` what the whole job takes, divided over the ranks. ``evaluate=True`` divides the samples
    without placeholders and leaves the gradient's weights alone. `seed` fixes the order of shuffled
    epochs; by default it is rank 0's ``torch.initial_seed()``.

    Raises `ConfigError` for something that is not a DataLoader, for one that is divided already, and for
    a batch too small to divide.
    """
    here = world()
    if not isinstance(loader, DataLoader):
        raise ConfigError(f"shard: expected a torch.utils.data.DataLoader, got {type(loader).__name__}")
    if isinstance(loader, ShardedLoader) or isinstance(loader.sampler, DistributedSampler):
        raise ConfigError(
            f"shard: the loader is divided already (its sampler is a {type(loader.sampler).__name__})",
            remedy="give the plain loader, as one process would use it",
        )
    if split and loader.batch_size is not None and loader.batch_size < here.size:
        raise ConfigError(
            f"shard: a batch of {loader.batch_size} cannot be split over {here.size} ranks",
            remedy=f"use a batch_size of at least {here.size}",
        )
    return ShardedLoader(loader, here, split=split, evaluate=evaluate, seed=_agreed_seed(loader, here, seed))


class ShardedLoader(DataLoader[Any]):
    """A DataLoader over one rank's share. Made by `shard`; used like any other loader."""

    def __init__(self, source: DataLoader[Any], here: World, *, split: bool, evaluate: bool, seed: int) -> None:
        self.world = here
        self.evaluate = evaluate
        self.epoch = -1
        self._parts: RankSampler | RankBatches | None = None
        arguments: dict[str, Any] = {name: getattr(source, name) for name in _KEPT if hasattr(source, name)}
        batch_size = source.batch_size
        whole = 0 if batch_size is None else batch_size * (1 if split else here.size)
        division = Division(here.rank, here.size, whole, drop_last=source.drop_last, placeholders=not evaluate)
        if isinstance(source.dataset, IterableDataset):
            if batch_size is None:
                raise ConfigError("shard: a stream without batch_size cannot be divided", remedy="set batch_size")
            arguments["collate_fn"] = divide_stream.collate(source.collate_fn)
            super().__init__(divide_stream(source.dataset, division), batch_size=division.own_size, **arguments)
        elif batch_size is None and source.batch_sampler is not None:
            self._parts = RankBatches(cast("Iterable[list[int]]", source.batch_sampler), division, here)
            super().__init__(source.dataset, batch_sampler=self._parts, **arguments)
        elif batch_size is None:
            raise ConfigError("shard: a loader without batches cannot be divided", remedy="set batch_size")
        else:
            self._parts = RankSampler(source.sampler, division, here, seed)
            super().__init__(source.dataset, batch_size=division.own_size, sampler=self._parts, **arguments)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration be epoch `epoch` (counted by itself otherwise)."""
        self.epoch = epoch - 1

    def __len__(self) -> int:
        """Steps in an epoch on this rank."""
        return super().__len__() if self._parts is None else self._parts.steps()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield this rank's batches, telling the engine the weight of each."""
        self.epoch += 1
        if isinstance(self._parts, RankSampler):
            self._parts.epoch = self.epoch
        iterator = super().__iter__()
        leave_out(iterator)
        parts = self._parts.shares() if self._parts is not None else None
        share, record = self.world.share, self.world.recorder.record
        while True:
            begin = time.monotonic()
            try:
                batch = next(iterator)
            except StopIteration:
                break
            if isinstance(batch, Fed):
                batch, part = batch.batch, batch.part
            else:
                assert parts is not None, "a loader that is no stream has shares"
                part = next(parts)
            if not self.evaluate:
                share.set(part.factor)
                record(DataWait(begin, time.monotonic(), part.samples))
            yield batch
        if not self.evaluate:
            share.set(1.0)


_KEPT = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
    "generator", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order",
)  # fmt: skip


class RankSampler(Sampler[int]):
    """This rank's samples of each of the job's batches, one after the other."""

    def __init__(self, source: Sampler[Any] | Iterable[Any], division: Division, here: World, seed: int) -> None:
        self.source = source
        self.epoch = 0
        self._division = division
        self._world = here
        self._seed = seed
        self._total = 0

    def __len__(self) -> int:
        """Samples an epoch on this rank, placeholders included."""
        total = len(cast("Sized", self.source))
        return sum(len(part.positions) for part in self._division.parts(total))

    def steps(self) -> int:
        """Return the batches an epoch on this rank."""
        return self._division.steps(len(cast("Sized", self.source)))

    def __iter__(self) -> Iterator[int]:
        order = self._order()
        self._total = len(order)
        for part in self._division.parts(self._total):
            yield from (order[position] for position in part.positions)

    def shares(self) -> Iterator[Part]:
        """Yield what is known of each batch, in the order in which batches come.

        To be advanced only after the iteration began: a sampler may draw another number than its length.
        """
        yield from self._division.parts(self._total)

    def _order(self) -> Sequence[int]:
        source = self.source
        if isinstance(source, SequentialSampler):
            return range(len(source))
        if isinstance(source, RandomSampler) and not source.replacement and source._num_samples is None:
            generator = torch.Generator().manual_seed((self._seed + self.epoch) % 2**63)
            order: list[int] = torch.randperm(len(source), generator=generator).tolist()
            return order
        return _drawn_by_rank_0(source, self._world)


class RankBatches(Sampler[list[int]]):
    """Whole batches of a batch sampler of the user's own, dealt to the ranks in turn."""

    def __init__(self, source: Iterable[list[int]], division: Division, here: World) -> None:
        self.source = source
        self._division = division
        self._world = here
        self._sizes: list[list[int]] = []

    def __len__(self) -> int:
        return self.steps()

    def steps(self) -> int:
        """Return the batches an epoch on this rank."""
        count = len(cast("Sized", self.source))
        first = 0 if self._division.placeholders else self._division.rank
        return len(range(first, count, self._division.size))

    def __iter__(self) -> Iterator[list[int]]:
        rank, size = self._division.rank, self._division.size
        batches = _dealt_by_rank_0(self.source, self._world)
        self._sizes.clear()
        for first in range(0, len(batches), size):
            round_ = batches[first : first + size]
            self._sizes.append([len(batch) for batch in round_])
            if rank < len(round_):
                yield round_[rank]
            elif self._division.placeholders:
                yield batches[0][:1]

    def shares(self) -> Iterator[Part]:
        """Yield what is known of each batch, in the order in which batches come."""
        rank, size = self._division.rank, self._division.size
        step = 0
        while True:
            sizes = self._sizes[step]
            own = sizes[rank] if rank < len(sizes) else 0
            yield Part(range(0), own, own * size / sum(sizes))
            step += 1


def _agreed_seed(loader: DataLoader[Any], here: World, seed: int | None) -> int:
    if seed is None:
        generator = getattr(loader.sampler, "generator", None)
        seed = generator.initial_seed() if generator is not None else torch.initial_seed()
    return int(gather(here, "seed of the data order", int(seed))[0])


def _drawn_by_rank_0(source: Iterable[Any], here: World) -> list[int]:
    order = torch.tensor(list(source) if here.rank == 0 else [], dtype=torch.int64)
    return _from_rank_0(order, here)


def _dealt_by_rank_0(source: Iterable[list[int]], here: World) -> list[list[int]]:
    batches = [list(batch) for batch in source] if here.rank == 0 else []
    sizes = _from_rank_0(torch.tensor([len(batch) for batch in batches], dtype=torch.int64), here)
    flat = _from_rank_0(torch.tensor([i for batch in batches for i in batch], dtype=torch.int64), here)
    ends = torch.tensor(sizes, dtype=torch.int64).cumsum(0).tolist()
    return [flat[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _from_rank_0(values: torch.Tensor, here: World) -> list[int]:
    if here.size > 1:
        length = int(gather(here, "length of the data order", values.numel())[0])
        if here.rank != 0:
            values = torch.empty(length, dtype=torch.int64)
        dist.broadcast(values, src=0, group=here.group)
    found: list[int] = values.tolist()
    return found
