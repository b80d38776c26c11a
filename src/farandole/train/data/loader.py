"""`fd.shard`: each rank's share of a loader's batches, so that no sample is lost or doubled.

[Note: how data is divided] Batch i of the job is a run of the epoch's order, the same for every number
of ranks; rank r takes its contiguous part of it. The last batch may be short: it is divided as evenly
as it can be. When it holds fewer samples than there are ranks, a rank without one gets the epoch's
first sample again as a *placeholder*, so that its loop makes the same number of steps; it counts for
nothing (see [Note: the true mean]). In evaluation no rank gets a placeholder.

The order of an epoch is a pure function of (seed, epoch) for the ordinary random sampler, and rank
0's draw, sent to all, for a sampler of the user's own.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import count
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from ...comm.batch_weight.drawn_batches import Origin
from ...comm.world.comm_errors import translated
from ...comm.world.store_sync import all_gather_json, require_same
from ...comm.world.world import World, world
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.events import DataWait
from .loader_kind import counts_itself, divided_kind, facts_of, no_draw, refuse_divided, refuse_strange
from .loader_watch import leave_out
from .partition import Part, Partition
from .stream import ShardedBatch, divide_stream

T = TypeVar("T")


def shard(
    loader: DataLoader[T], *, split: bool = False, evaluate: bool = False, seed: int | None = None
) -> ShardedLoader:
    """Return a loader of this rank's shard of the batches of `loader`.

    A subclass of DataLoader stays one; its own ``__iter__`` runs over the batches of this rank.

    Args:
        loader: a DataLoader, the same on all ranks. Its ``batch_size`` is the batch of one rank.
        split: if True, ``batch_size`` is the global batch, which is divided over the ranks.
        evaluate: if True, samples are divided without placeholders, and gradient weights are not changed.
        seed: seed of the order of shuffled epochs; by default rank 0's ``torch.initial_seed()``.

    Returns:
        The sharded loader; ``set_epoch`` selects the order of an epoch.

    Raises:
        ConfigError: `loader` is no DataLoader, is sharded already, or its batch is too small to divide.
        Mismatch: the ranks' loaders differ; raised on every rank.
    """
    here = world()
    if not isinstance(loader, DataLoader):
        raise ConfigError(f"shard: expected a torch.utils.data.DataLoader, got {type(loader).__name__}")
    refuse_divided(loader, ShardedLoader)
    refuse_strange(loader)
    if split and loader.batch_size is not None and loader.batch_size < here.size:
        raise ConfigError(
            f"shard: a batch of {loader.batch_size} cannot be split over {here.size} ranks",
            remedy=f"use a batch_size of at least {here.size}",
        )
    facts = [*facts_of(loader), ("split", split), ("evaluate", evaluate)]
    require_same(here, "comparing the loaders given to fd.shard", facts, remedy=_SAME_LOADER)
    theirs: Any = type(loader)
    kind: Any = divided_kind(ShardedLoader, theirs)
    made: ShardedLoader = kind.__new__(
        kind
    )  # not by a constructor of the user's: only its class knows the arguments
    order_seed = _agreed_seed(loader, here, seed)
    ShardedLoader.__init__(made, loader, here, split=split, evaluate=evaluate, seed=order_seed)
    return made


_SAME_LOADER = "give the same loader on all ranks: fd.shard divides it"


class ShardedLoader(DataLoader[Any]):
    """A DataLoader over one rank's share. Made by `shard`; used like any other loader."""

    def __init__(self, source: DataLoader[Any], here: World, *, split: bool, evaluate: bool, seed: int) -> None:
        # What a subclass keeps beside; what torch's own class keeps is made anew below.
        self.__dict__.update({name: value for name, value in vars(source).items() if name != _IS_MADE})
        own = self._farandole = _Own(here, evaluate)
        arguments: dict[str, Any] = {name: getattr(source, name) for name in _KEPT if hasattr(source, name)}
        batch_size = source.batch_size
        whole = 0 if batch_size is None else batch_size * (1 if split else here.size)
        partition = Partition(here.rank, here.size, whole, drop_last=source.drop_last, placeholders=not evaluate)
        if isinstance(source.dataset, IterableDataset):
            if batch_size is None:
                raise ConfigError("shard: a stream without batch_size cannot be divided", remedy="set batch_size")
            arguments["collate_fn"] = divide_stream.collate(source.collate_fn)
            stream = divide_stream(source.dataset, partition)
            DataLoader.__init__(self, stream, batch_size=partition.own_size, **arguments)
        elif batch_size is None and source.batch_sampler is not None:
            own.parts = RankBatches(cast("Iterable[list[int]]", source.batch_sampler), partition, here)
            DataLoader.__init__(self, source.dataset, batch_sampler=own.parts, **arguments)
        elif batch_size is None:
            raise ConfigError("shard: a loader without batches cannot be divided", remedy="set batch_size")
        else:
            own.parts = RankSampler(source.sampler, partition, here, seed)
            DataLoader.__init__(
                self, source.dataset, batch_size=partition.own_size, sampler=own.parts, **arguments
            )

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration be epoch `epoch` (counted by itself otherwise)."""
        self._farandole.epoch = epoch - 1
        theirs = getattr(super(), "set_epoch", None)
        if theirs is not None:  # a subclass that wants to know, too
            theirs(epoch)

    def __len__(self) -> int:
        """Steps in an epoch on this rank."""
        parts = self._farandole.parts
        if parts is None or counts_itself(type(self)):
            return super().__len__()
        return parts.steps()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield this rank's batches, telling the reducer the weight of each."""
        return self._farandole.hand_out(super().__iter__(), type(self))

    def _get_iterator(self) -> Any:
        self._farandole.begin_epoch()
        return _Drawing(super()._get_iterator(), self._farandole)


_numbers = count()


class _Own:
    """What a divided loader keeps for itself: apart, as a subclass may have attributes of any name."""

    def __init__(self, here: World, evaluate: bool) -> None:
        self.world = here
        self.evaluate = evaluate
        self.epoch = -1
        self.parts: RankSampler | RankBatches | None = None
        self.draws = 0
        self._number = next(_numbers)

    @property
    def origin(self) -> Origin:
        return Origin(self._number, self.epoch)

    def hand_out(self, batches: Iterator[Any], kind: type[Any]) -> Iterator[Any]:
        """Yield `batches`: those of `_Drawing`, or what a subclass makes of them."""
        try:
            for batch in batches:
                if not self.draws:
                    raise no_draw(kind, "yields batches that it does not get from super().__iter__()")
                yield batch
        finally:
            if not self.evaluate:
                self.world.session.batch_weight.loop_ends(self.origin)

    def begin_epoch(self) -> None:
        """Torch is about to draw the batches of another epoch."""
        self.epoch += 1
        if isinstance(self.parts, RankSampler):
            asked, self.parts.asked_epoch = self.parts.asked_epoch, None
            self.epoch = self.epoch if asked is None else asked
            self.parts.epoch = self.epoch
        if not self.evaluate and self.world.size > 1 and (self.parts is None or self.parts.may_be_unequal):
            self.world.session.batch_weight.watches = True


class _Drawing:
    """Torch's iterator of one epoch, which tells the weight of each batch that it hands out."""

    def __init__(self, batches: Any, own: _Own) -> None:
        self._batches = batches
        self._own = own
        self._start()

    def _start(self) -> None:
        self._shares = None if self._own.parts is None else self._own.parts.shares()
        self._origin = self._own.origin
        leave_out(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> Any:
        begin = time.monotonic()
        batch = next(self._batches)
        own = self._own
        own.draws += 1
        if isinstance(batch, ShardedBatch):
            batch, part = batch.batch, batch.part
        else:
            assert self._shares is not None, "a loader that is no stream has shares"
            part = next(self._shares)
        if not own.evaluate:
            own.world.session.batch_weight.hand_out(batch, part.factor, part.samples, self._origin)
            own.world.session.recorder.record(DataWait(begin, time.monotonic(), part.samples))
        return batch

    def _reset(self, loader: ShardedLoader, *arguments: Any) -> None:
        """Begin the next epoch: torch keeps the iterator of persistent workers."""
        self._own.begin_epoch()
        self._batches._reset(loader, *arguments)
        self._start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


_IS_MADE = "_DataLoader__initialized"
"""By which torch's class knows that its attributes must not change any more."""

_KEPT = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
    "generator", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order",
)  # fmt: skip


class RankSampler(Sampler[int]):
    """This rank's samples of each of the job's batches, one after the other."""

    def __init__(self, source: Sampler[Any] | Iterable[Any], partition: Partition, here: World, seed: int) -> None:
        self.source = source
        self.epoch = 0
        self.asked_epoch: int | None = None
        """What `set_epoch` was given since the last iteration began."""
        self._partition = partition
        self._world = here
        self._seed = seed
        self._total = 0

    def __len__(self) -> int:
        """Samples an epoch on this rank, placeholders included."""
        total = len(cast("Sized", self.source))
        return sum(len(part.positions) for part in self._partition.parts(total))

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration be epoch `epoch`: scripts say it to ``loader.sampler``, too."""
        self.asked_epoch = epoch

    def steps(self) -> int:
        """Return the batches an epoch on this rank."""
        return self._partition.steps(len(cast("Sized", self.source)))

    @property
    def may_be_unequal(self) -> bool:
        """Whether the ranks' parts of the last batch may differ in size."""
        source = self.source
        if not isinstance(source, (SequentialSampler, RandomSampler)):
            return not self._partition.drop_last  # it may draw another number than its length
        return not self._partition.drop_last and len(source) % self._partition.whole > 0

    def __iter__(self) -> Iterator[int]:
        order = self._order()
        self._total = len(order)
        for part in self._partition.parts(self._total):
            yield from (order[position] for position in part.positions)

    def shares(self) -> Iterator[Part]:
        """Yield what is known of each batch, in the order in which batches come.

        To be advanced only after the iteration began: a sampler may draw another number than its length.
        """
        yield from self._partition.parts(self._total)

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

    def __init__(self, source: Iterable[list[int]], partition: Partition, here: World) -> None:
        self.source = source
        self._partition = partition
        self._world = here
        self._sizes: list[list[int]] = []

    may_be_unequal = True

    def __len__(self) -> int:
        return self.steps()

    def steps(self) -> int:
        """Return the batches an epoch on this rank."""
        count = len(cast("Sized", self.source))
        first = 0 if self._partition.placeholders else self._partition.rank
        return len(range(first, count, self._partition.size))

    def __iter__(self) -> Iterator[list[int]]:
        rank, size = self._partition.rank, self._partition.size
        batches = _dealt_by_rank_0(self.source, self._world)
        self._sizes.clear()
        for first in range(0, len(batches), size):
            round_ = batches[first : first + size]
            self._sizes.append([len(batch) for batch in round_])
            if rank < len(round_):
                yield round_[rank]
            elif self._partition.placeholders:
                yield batches[0][:1]

    def shares(self) -> Iterator[Part]:
        """Yield what is known of each batch, in the order in which batches come."""
        rank, size = self._partition.rank, self._partition.size
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
    return int(all_gather_json(here, "seed of the data order", int(seed))[0])


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
        length = int(all_gather_json(here, "length of the data order", values.numel())[0])
        if here.rank != 0:
            values = torch.empty(length, dtype=torch.int64)
        with translated(here, "order of the data"):
            dist.broadcast(values, src=0, group=here.group)
    found: list[int] = values.tolist()
    return found
