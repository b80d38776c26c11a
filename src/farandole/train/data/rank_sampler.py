"""Which samples a rank draws in an epoch: its parts of the job's batches, from the start or where a run resumes.

[Note: epochs and resuming] Every iteration is the next epoch, and `set_epoch` says which one instead. A state
holds the epoch, how far the job's order was used, and the seed of the order: the rest of the epoch then comes as
it would have come, also on another number of ranks. The order of a sampler of the user's own is drawn by rank 0
and is not known from the epoch, so such an epoch resumes at its beginning only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from ...comm.world.comm_errors import translated
from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from .partition import Part, Partition

T = TypeVar("T")


class EpochSampler(Sampler[T]):
    """What samplers of a divided loader have in common: the epoch, and all else that the user's sampler has."""

    def __init__(self, source: Any, partition: Partition, here: World) -> None:
        self.source = source
        self.epoch = 0
        self.asked_epoch: int | None = None
        """What `set_epoch` was given since the last iteration began."""
        self.first = 0
        """Where in the job's order the iteration begins."""
        self._partition = partition
        self._world = here

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration be epoch `epoch`: scripts say it to the sampler, too."""
        self.asked_epoch = epoch
        theirs = getattr(self.source, "set_epoch", None)
        if theirs is not None:
            theirs(epoch)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "source":
            raise AttributeError(name)
        return getattr(self.source, name)


class RankSampler(EpochSampler[int]):
    """This rank's samples of each of the job's batches, one after the other."""

    def __init__(self, source: Sampler[Any] | Iterable[Any], partition: Partition, here: World, seed: int) -> None:
        super().__init__(source, partition, here)
        self.seed = seed
        self._total = 0

    def __len__(self) -> int:
        """Samples an epoch on this rank, placeholders included."""
        return sum(len(part.positions) for part in self._partition.parts(len(self.source)))

    def steps(self) -> int:
        """Return the batches an epoch on this rank."""
        return self._partition.steps(len(self.source))

    @property
    def unit(self) -> int:
        """How far one batch goes in the job's order."""
        return self._partition.whole

    @property
    def is_known(self) -> bool:
        """Whether seed and epoch give the order."""
        return self.is_shuffled or isinstance(self.source, SequentialSampler)

    @property
    def is_shuffled(self) -> bool:
        """Whether the order is another one in each epoch, and known from it."""
        source = self.source
        return isinstance(source, RandomSampler) and not source.replacement and source._num_samples is None

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
        for part in self._partition.parts(self._total, self.first):
            yield from (order[position] for position in part.positions)

    def shares(self) -> Iterator[Part]:
        """Yield what is known of each batch, in the order in which batches come.

        To be advanced only after the iteration began: a sampler may draw another number than its length.
        """
        yield from self._partition.parts(self._total, self.first)

    def _order(self) -> Sequence[int]:
        source = self.source
        if isinstance(source, SequentialSampler):
            return range(len(source))
        if self.is_known:
            generator = torch.Generator().manual_seed((self.seed + self.epoch) % 2**63)
            order: list[int] = torch.randperm(len(source), generator=generator).tolist()
            return order
        return drawn_by_rank_0(source, self._world)


class RankBatches(EpochSampler[list[int]]):
    """Whole batches of a batch sampler of the user's own, dealt to the ranks in turn."""

    may_be_unequal = True
    is_known = is_shuffled = False
    seed = 0

    def __init__(self, source: Iterable[list[int]], partition: Partition, here: World) -> None:
        super().__init__(source, partition, here)
        self._sizes: list[list[int]] = []

    def __len__(self) -> int:
        return self.steps()

    @property
    def unit(self) -> int:
        """How many of the user's batches one round takes."""
        return self._partition.size

    def steps(self) -> int:
        """Return the batches an epoch on this rank."""
        first = 0 if self._partition.placeholders else self._partition.rank
        return len(range(first, len(self.source), self._partition.size))

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


def drawn_by_rank_0(source: Iterable[Any], here: World) -> list[int]:
    """Return what `source` yields on rank 0, on all ranks."""
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
    return cast("list[int]", values.tolist())
