"""Which samples a rank draws in an epoch: its parts of the job's batches, from the start or where a run resumes.

See [Note: epochs and resuming] in `position`, and [Note: random numbers by place].
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, islice
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler, get_worker_info

from ...comm.world.comm_errors import translated
from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...core.vocabulary.errors import ConfigError
from ...parallel.seeds import kept_generators
from ..balance import ShareChanges
from .length_buckets import Cut, LengthBuckets, digest_of, is_permutation
from .partition import Part, Partition
from .position import CutAt, LoopPlace, reordered

# One epoch's order, cut into the job's batches, and this rank's part of each: what one iteration goes by.
#
# An iteration has a plan of its own, so that two loops over one loader do not disturb each other. The order is
# drawn when it is needed first: for a sampler of the user's own that is a message from rank 0.


class Step(NamedTuple):
    """One of the job's batches, as one rank sees it."""

    part: Part
    used: int
    """How far it goes in the job's order."""


class Order(NamedTuple):
    """An order of samples."""

    samples: torch.Tensor | range
    sizes: Sequence[int] | None = None
    """Samples of each of the job's batches, where these differ."""


class EpochPlan:
    """The rest of an epoch of single samples, from `place` on."""

    def __init__(
        self,
        place: LoopPlace,
        partition: Partition,
        draw: Callable[[LoopPlace], Order],
        seed: int,
        changes: ShareChanges | None = None,
    ) -> None:
        """`changes`: of the shares of the ranks, where these are not equal."""
        self.place = place
        self.begin = place.used
        self.seed = seed
        self.batches_before = place.batches
        self._partition = partition
        self._draw = draw
        self._changes = changes

    @cached_property
    def order(self) -> Order:
        """The samples, from where the order was cut last."""
        return self._draw(self.place)

    @property
    def total_steps(self) -> int:
        """This rank's steps in the epoch, with those before `place`."""
        return self.batches_before + sum(1 for _ in self.steps())

    def steps(self) -> Iterator[Step]:
        """Yield what is known of each of this rank's batches."""
        return self._walk(draws=False)

    def batches(self) -> Iterator[list[int]]:
        """Yield the indexes of each of this rank's batches."""
        samples = self.order.samples
        for part, _ in self._walk(draws=True):
            positions = part.positions
            if isinstance(samples, range):
                yield [samples[position] for position in positions]
            else:
                yield samples[positions.start : positions.stop].tolist()

    def lost_with(self, ranks: Collection[int], batches: range) -> tuple[int, list[int]]:
        """Return where some batches end, and which positions in them are those of `ranks`.

        `batches`: counted in the epoch, from 0.
        """
        end, lost = self.begin, list[int]()
        for number, (position, size) in enumerate(self._runs(), self.batches_before):
            if number >= batches.stop:
                break
            end = position + size
            if number >= batches.start:
                for rank in ranks:
                    lost += replace(self._partition, rank=rank).cut(position, size)
        return end, lost

    def _runs(self) -> list[tuple[int, int]]:
        """Return where each of the job's batches begins, counted from the last cut, and its samples."""
        samples, sizes = self.order
        cut = self.place.cuts[-1].begin if self.place.cuts else 0
        whole = self._partition.whole
        if sizes is None:
            starts = range(self.begin - cut, len(samples), whole)
            return [(start, min(whole, len(samples) - start)) for start in starts]
        ends = list(accumulate(sizes))
        return [
            (end - size, size) for end, size in zip(ends, sizes, strict=True) if end - size >= self.begin - cut
        ]

    def _walk(self, *, draws: bool) -> Iterator[Step]:
        """`draws`: the batches are given out, by the shares of now. See [Note: where shares change]."""
        cut = self.place.cuts[-1].begin if self.place.cuts else 0
        for position, size in self._runs():
            if size < self._partition.whole and self._partition.drop_last:
                continue
            part = self._divided(cut + position, size, draws=draws).part(position, size)
            if part is not None:
                yield Step(part, size)

    def _divided(self, used: int, size: int, *, draws: bool) -> Partition:
        if self._changes is None:
            return self._partition
        iteration = self.place.iteration
        found = self._changes.draw(iteration, used, used + size) if draws else self._changes.at(iteration, used)
        return replace(self._partition, division=found)


class RoundsPlan:
    """The rest of an epoch of whole batches of the user's, dealt to the ranks in turn."""

    def __init__(
        self, place: LoopPlace, partition: Partition, draw: Callable[[LoopPlace], Sequence[Sequence[int]]]
    ) -> None:
        self.place = place
        self.begin = place.used
        self.batches_before = place.batches
        self._partition = partition
        self._draw = draw

    @cached_property
    def order(self) -> Sequence[Sequence[int]]:
        """All batches of the epoch."""
        return self._draw(self.place)

    @property
    def total_steps(self) -> int:
        """This rank's steps in the epoch, with those before `place`."""
        return self.batches_before + sum(1 for _ in self.steps())

    def steps(self) -> Iterator[Step]:
        """Yield what is known of each of this rank's batches."""
        for round_ in self._rounds():
            sizes = [len(batch) for batch in round_]
            own = sizes[self._partition.rank] if self._partition.rank < len(sizes) else 0
            if own or self._partition.placeholders:
                yield Step(Part(range(0), own, own * self._partition.size / sum(sizes)), len(sizes))

    def batches(self) -> Iterator[list[int]]:
        """Yield this rank's batches."""
        for round_ in self._rounds():
            if self._partition.rank < len(round_):
                yield list(round_[self._partition.rank])
            elif self._partition.placeholders:
                yield list(self.order[0])  # the whole: a loss may need several samples

    def _rounds(self) -> Iterator[Sequence[Sequence[int]]]:
        for first in range(self.begin, len(self.order), self._partition.size):
            yield self.order[first : first + self._partition.size]


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

    def divide(self, partition: Partition) -> None:
        """Divide later plans otherwise."""
        self._partition = partition

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

    def divide(self, partition: Partition) -> None:
        """Divide later plans otherwise."""
        if self._buckets is not None:
            cut, before = self._buckets.cut, self._partition
            tokens = cut.tokens * before.size // partition.size if before.whole == partition.whole else cut.tokens
            self._buckets = LengthBuckets(
                self._buckets.lengths, Cut(partition.whole, tokens), is_sorted=self._buckets.is_sorted
            )
        super().divide(partition)

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
            return Order(torch.as_tensor(reordered(list(samples), place.moved)) if place.moved else samples)
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


# Random numbers that go by the place in the data, so that a resumed run draws those of an uninterrupted one.
#
# [Note: random numbers by place] Three draws of a loader would else depend on what was drawn before them:
#
# 1. the order of a sampler of the user's own: it is drawn with generators that are seeded by (seed, epoch) and put
# back as they were afterwards; 2. the seed of worker processes, which torch draws when an iteration begins: it
# comes from a generator of the loader, seeded by (seed, epoch, rank), so that an iteration takes no number of the
# generators of the training; 3. augmentation in worker processes: each batch of a dataset with indexes begins with
# seeds of (seed, epoch, place of the batch, rank), whichever worker reads it. What a worker process receives is
# the pickled list of indexes, one batch at a time, directly before it reads them: the list seeds the worker where
# it is unpickled.
#
# The training's own process is left alone: with no workers, augmentation draws from the generators of the rank. A
# script that resumes has to restore them.


_LIMIT = 2**63
_NUMPY_LIMIT = 2**32


def seed_of(*place: int) -> int:
    """Return a seed that is far from those of neighbouring places."""
    digest = hashlib.blake2b("/".join(map(str, place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _LIMIT


@contextmanager
def seeded(number: int, source: Any) -> Iterator[None]:
    """Draw with generators that are seeded by `number`: the global ones, and those of the sampler `source`."""
    generators = _generators_of(source)
    with kept_generators(*generators):
        for generator in (torch.default_generator, *generators):
            generator.manual_seed(number)
        random.seed(number)
        np.random.seed(number % _NUMPY_LIMIT)
        yield


def generator_states() -> tuple[Any, ...]:
    """Return the states of the global generators on the CPU, to be compared."""
    numpy_state: Any = np.random.get_state()
    _, keys, *rest = numpy_state
    return bytes(torch.default_generator.get_state().numpy()), random.getstate(), keys.tobytes(), tuple(rest)


def _generators_of(source: Any) -> list[torch.Generator]:
    found: list[torch.Generator] = []
    for _ in range(4):  # samplers within samplers
        generator = getattr(source, "generator", None)
        if isinstance(generator, torch.Generator) and generator.device.type == "cpu":
            found.append(generator)
        source = getattr(source, "sampler", None)
    return found


class SeededIndexes(list[int]):
    """The indexes of a batch, which seed a worker process that receives them."""

    def __init__(self, indexes: list[int], seed: int) -> None:
        super().__init__(indexes)
        self.seed = seed

    def __reduce__(self) -> tuple[Callable[[list[int], int], list[int]], tuple[list[int], int]]:
        return _received, (list(self), self.seed)


def _received(indexes: list[int], seed: int) -> list[int]:
    if get_worker_info() is not None:
        random.seed(seed)
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which queues a call for each batch
        np.random.seed(seed % _NUMPY_LIMIT)
    return indexes
