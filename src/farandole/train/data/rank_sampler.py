"""Which samples a rank draws in an epoch: its parts of the job's batches, from the start or where a run resumes.

See [Note: epochs and resuming] in `position` and [Note: random numbers by place] in `random_state`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler

from ...comm.world.comm_errors import translated
from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...core.vocabulary.errors import ConfigError
from ..balance import ShareChanges
from .epoch_plan import EpochPlan, Order, RoundsPlan
from .length_buckets import Cut, LengthBuckets, digest_of, is_permutation
from .partition import Partition
from .position import CutAt, LoopPlace
from .random_state import SeededIndexes, seed_of, seeded

_MOST_SAMPLES = 10_000_000
_MOST_BATCHES = 1_000_000
T = TypeVar("T")
PlanT = TypeVar("PlanT", EpochPlan, RoundsPlan)


class EpochSampler(Sampler[T], Generic[T, PlanT]):
    """What samplers of a divided loader have in common: the epoch, and all else that the user's sampler has."""

    is_known = False
    """Whether seed and epoch are sure to give the order."""
    has_buckets = False
    """Whether batches go by length."""
    is_shuffled = False
    """Whether the order is another one in each epoch, and known from it."""

    def __init__(self, source: Any, partition: Partition, here: World, seed: int) -> None:
        self.source = source
        self.seed = seed
        self.asked_epoch: int | None = None
        """What `set_epoch` was given since the last iteration began."""
        self.plan: PlanT | None = None
        """That of the iteration that draws next."""
        self._partition = partition
        self._world = here

    def make_plan(self, place: LoopPlace) -> PlanT:
        """Return what an iteration at `place` goes by."""
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration be epoch `epoch`: scripts say it to the sampler, too."""
        self.asked_epoch = epoch
        theirs = getattr(self.source, "set_epoch", None)
        if theirs is not None:
            theirs(epoch)

    def batches(self) -> Iterator[list[int]]:
        """Return the indexes of the batches of the iteration that draws next; it may change meanwhile."""
        return self._seeded(self._current_plan())

    def _current_plan(self) -> PlanT:
        return self.plan if self.plan is not None else self.make_plan(LoopPlace(self.asked_epoch or 0))

    def _seeded(self, plan: PlanT) -> Iterator[list[int]]:
        used = plan.begin
        for indexes, step in zip(plan.batches(), plan.steps(), strict=True):
            yield SeededIndexes(indexes, seed_of(self.seed, plan.place.epoch, used, self._partition.rank))
            used += step.used

    def refuse_state(self, state: Mapping[str, Any]) -> None:
        """Raise `ConfigError` for the middle of an epoch of another kind of order."""
        is_known = bool(state["cuts"]) or not state["order"]
        if bool(state["cuts"]) != self.has_buckets or (is_known != self.is_known and not self.has_buckets):
            raise ConfigError(
                f"load_state_dict: the order of epoch {state['epoch']}, in which the state was saved after "
                f"{state['batches']} batches, was made in another way than by this {type(self.source).__name__}"
                f"{' and by lengths' if self.has_buckets else ''}",
                remedy="give fd.shard the loader with which the state was saved, or save at the end of an epoch",
            )
        if self.is_known:
            _refuse_other_count(state["epoch"], state["batches"], state["samples"], len(self.source))

    def _note_order(self, place: LoopPlace, samples: int, order: int) -> None:
        """Remember what order `place` is in; raise `ConfigError` if a state that was loaded is in another one."""
        _refuse_other_count(place.epoch, place.batches, place.samples or samples, samples)
        self._refuse_other_order(place, place.order, order)
        place.samples, place.order = samples, order

    def _refuse_other_order(self, place: LoopPlace, saved: int, found: int) -> None:
        if saved not in (0, found):
            raise ConfigError(
                f"resuming in epoch {place.epoch} after {place.batches} batches: its order is not the one in "
                "which the state was saved, so its remainder is not known (other data, other lengths, or a "
                f"{type(self.source).__name__} that draws differently each time)",
                remedy="give the same data; a sampler with random state of its own needs a set_epoch by which its "
                "order goes. Or save the state at the end of an epoch",
            )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "source":
            raise AttributeError(name)
        return getattr(self.source, name)


class RankSampler(EpochSampler[int, EpochPlan]):
    """This rank's samples of each of the job's batches, one after the other."""

    def __init__(
        self,
        source: Sampler[Any] | Iterable[Any],
        partition: Partition,
        here: World,
        seed: int,
        buckets: LengthBuckets | None = None,
    ) -> None:
        super().__init__(source, partition, here, seed)
        self._buckets = buckets
        self.changes: ShareChanges | None = None
        """Changes of the shares of the ranks; None: these are equal."""
        self.has_buckets = buckets is not None

    def __len__(self) -> int:
        """Samples an epoch on this rank, placeholders included."""
        return sum(len(part.positions) for part in self._partition.parts(len(self.source)))

    def __iter__(self) -> Iterator[int]:
        return (index for batch in self._current_plan().batches() for index in batch)

    def steps(self) -> int:
        """Return the batches an epoch on this rank."""
        return self._partition.steps(len(self.source))

    @property
    def has_budget(self) -> bool:
        """Whether batches have a budget of tokens, so that epochs differ in their number."""
        return self._buckets is not None and self._buckets.cut.tokens > 0

    @property
    def is_known(self) -> bool:  # type: ignore[override]
        """Whether seed and epoch are sure to give the order."""
        return is_permutation(self.source) or isinstance(self.source, SequentialSampler)

    @property
    def is_shuffled(self) -> bool:  # type: ignore[override]
        """Whether the order is another one in each epoch, and known from it."""
        if self._buckets is not None:
            return not self._buckets.is_sorted
        return is_permutation(self.source)

    def may_be_unequal(self, place: LoopPlace) -> bool:
        """Return whether the ranks' parts of the last batch may differ in size."""
        source = self.source
        if self.changes is not None:
            return True
        if not isinstance(source, (SequentialSampler, RandomSampler)):
            return not self._partition.drop_last  # it may draw another number than its length
        return not self._partition.drop_last and (len(source) - place.used) % self._partition.whole > 0

    def make_plan(self, place: LoopPlace) -> EpochPlan:
        """Return what an iteration at `place` goes by."""
        if self._buckets is not None:
            self._cut_again(place, self._buckets.cut)
        return EpochPlan(place, self._partition, self._order, self.seed, self.changes)

    def _cut_again(self, place: LoopPlace, cut: Cut) -> None:
        """Cut the remainder of a resumed epoch anew, if its batches were others."""
        latest = place.cuts[-1] if place.cuts else None
        if latest is None or (latest.multiple, latest.tokens) != cut:
            kept = [each for each in place.cuts if each.begin < place.used]
            place.cuts = (*kept, CutAt(*cut, place.used))

    def _order(self, place: LoopPlace) -> Order:
        samples = self._drawn(place.epoch)
        if self._buckets is None:
            self._note_order(place, len(samples), 0 if self.is_known else digest_of(torch.as_tensor(samples)))
            return Order(samples)
        self._note_order(place, len(samples), 0)
        rest, sizes, begin, cuts = torch.as_tensor(samples), None, 0, []
        for i, cut in enumerate(place.cuts):
            rest, begin = rest[cut.begin - begin :], cut.begin
            rest, sizes = self._buckets.arrange(
                rest, seed_of(self.seed, place.epoch, i), Cut(cut.multiple, cut.tokens)
            )
            self._refuse_other_order(place, cut.order, digest_of(rest))
            cuts.append(cut._replace(order=digest_of(rest)))
        place.cuts = tuple(cuts)
        return Order(rest, sizes)

    def _drawn(self, epoch: int) -> torch.Tensor | range:
        source = self.source
        if isinstance(source, SequentialSampler):
            return range(len(source))
        if is_permutation(source):
            generator = torch.Generator().manual_seed((self.seed + epoch) % 2**63)
            return torch.randperm(len(source), generator=generator)
        with seeded(seed_of(self.seed, epoch), source):
            return drawn_by_rank_0(source, self._world)


class RankBatches(EpochSampler[list[int], RoundsPlan]):
    """Whole batches of a batch sampler of the user's own, dealt to the ranks in turn."""

    def __len__(self) -> int:
        return self.steps()

    def __iter__(self) -> Iterator[list[int]]:
        return self.batches()

    def steps(self) -> int:
        """Return the batches an epoch on this rank."""
        first = 0 if self._partition.placeholders else self._partition.rank
        return len(range(first, len(self.source), self._partition.size))

    def may_be_unequal(self, place: LoopPlace) -> bool:
        """Return whether the ranks' batches may differ in size."""
        return True

    def make_plan(self, place: LoopPlace) -> RoundsPlan:
        """Return what an iteration at `place` goes by."""
        return RoundsPlan(place, self._partition, self._order)

    def _order(self, place: LoopPlace) -> list[list[int]]:
        with seeded(seed_of(self.seed, place.epoch), self.source):
            batches, count = _to_its_end(self.source, self._world, list, _MOST_BATCHES)
        sizes = _from_rank_0([len(batch) for batch in batches], count, self._world)
        flat = _from_rank_0([i for batch in batches for i in batch], int(sizes.sum()), self._world)
        self._note_order(place, len(sizes), digest_of(torch.cat([sizes, flat])))
        return [batch.tolist() for batch in flat.split(sizes.tolist())] if len(sizes) else []


class RankBatchSampler(BatchSampler):
    """The batches of a `RankSampler`, which end where the job's batches do."""

    sampler: RankSampler

    def __init__(self, sampler: RankSampler, batch_size: int) -> None:
        super().__init__(sampler, batch_size, drop_last=False)

    def __iter__(self) -> Iterator[list[int]]:
        return self.sampler.batches()

    def __len__(self) -> int:
        return self.sampler.steps()


def _refuse_other_count(epoch: int, batches: int, saved: int, found: int) -> None:
    if saved != found:
        raise ConfigError(
            f"resuming in epoch {epoch} after {batches} batches: the state is of an epoch of {saved} samples (or "
            f"batches of a batch_sampler), and this one has {found}",
            remedy="give the data with which the state was saved, or save it at the end of an epoch",
        )


def drawn_by_rank_0(source: Iterable[Any], here: World) -> torch.Tensor:
    """Return the samples that `source` yields on rank 0, on all ranks; raise `ConfigError` if it has no end."""
    drawn, count = _to_its_end(source, here, int, _MOST_SAMPLES)
    return _from_rank_0(drawn, count, here)


def _to_its_end(source: Iterable[Any], here: World, kind: Callable[[Any], T], most: int) -> tuple[list[T], int]:
    """Return what `source` yields on rank 0, as `kind`, nothing on others, and how much that is.

    Raises `ConfigError` on all ranks if it is more than the length of `source` (of batches that is often an
    estimate, and may be twice as many), or than `most` if it has none.
    """
    has_length = True
    try:
        most = len(source) * (2 if kind is list else 1)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        has_length = False
    drawn = list(islice(map(kind, source), most + 1)) if here.rank == 0 else []
    count, most, has_length = all_gather_json(here, "length of the data order", [len(drawn), most, has_length])[0]
    if count > most:
        raise ConfigError(
            f"shard: the order of an epoch by {type(source).__name__} does not end: it yields more than "
            f"{most}{', by its length' if has_length else ' and has no length'}",
            remedy="let it end after an epoch, and loop over epochs: while step < steps: for batch in loader: ...",
        )
    return drawn, count


def _from_rank_0(values: Any, length: int, here: World) -> torch.Tensor:
    is_first = here.rank == 0
    order = torch.tensor(values, dtype=torch.int64) if is_first else torch.empty(length, dtype=torch.int64)
    if here.size > 1:
        with translated(here, "order of the data"):
            dist.broadcast(order, src=0, group=here.group)
    return order
