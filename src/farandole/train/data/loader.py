"""`fd.shard`: each rank's share of a loader's batches, so that no sample is lost or doubled.

[Note: how data is divided] Batch i of the job is a run of the epoch's order, the same for every number
of ranks; rank r takes its contiguous part of it. The last batch may be short: it is divided as evenly
as it can be. When it holds fewer samples than there are ranks, a rank without one gets the epoch's
first sample again as a *placeholder*, so that its loop makes the same number of steps; it counts for
nothing (see [Note: the true mean]). In evaluation no rank gets a placeholder.

The order of an epoch is a pure function of (seed, epoch) for the ordinary random sampler, and rank
0's draw, sent to all, for a sampler of the user's own. See also [Note: length buckets] in `length_buckets`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar, cast, overload

import torch
from torch.utils.data import DataLoader, IterableDataset

from ...comm.world.store_sync import all_gather_json, require_same
from ...comm.world.world import World, world
from ...core.vocabulary.errors import ConfigError
from ...parallel.instrument.training_facts import note_loader
from ..same_data import data_of, refuse_other_data
from .drawing import Drawing, LoaderState, counts_itself, divided_kind, facts_of, refuse_divided, refuse_strange
from .length_buckets import Cut, LengthBuckets, Lengths, agreed_lengths, digest_of
from .partition import Partition
from .position import read_state
from .rank_sampler import RankBatches, RankBatchSampler, RankSampler
from .stream import divide_stream, has_states
from .told_later import depth_ahead
from .worker_cores import TunedLoaders, on_worker_cores, sparing_workers, worker_cores

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


def shard(
    loader: DataLoader[T],
    *,
    split: bool = False,
    evaluate: bool = False,
    seed: int | None = None,
    lengths: Lengths | None = None,
    max_tokens: int | None = None,
) -> ShardedLoader[T]:
    """Return a loader of this rank's shard of the batches of `loader`.

    A subclass of DataLoader stays one; its own ``__iter__`` runs over the batches of this rank.

    Args:
        loader: a DataLoader, the same on all ranks. Its ``batch_size`` is the batch of one rank.
        split: if True, ``batch_size`` is the global batch, which is divided over the ranks.
        evaluate: if True, samples are divided without placeholders, and gradient weights are not changed.
        seed: seed of the order of shuffled epochs; by default rank 0's ``torch.initial_seed()``.
        lengths: the length of each sample in tokens, so that the samples of a batch are about equally long, on
            all ranks alike: a sequence or tensor in the order of the dataset, a function of the index, or the name
            of a column of the dataset (of lengths, or of what has them). With `evaluate` the longest come first.
        max_tokens: tokens in a batch of one rank, padding included, instead of a number of samples (with `split`,
            in the global batch). Needs `lengths`, and a loader without ``batch_size``.

    Returns:
        The sharded loader. Each iteration is the next epoch; ``set_epoch`` selects another, and ``state_dict`` and
        ``load_state_dict`` resume a run, in the middle of an epoch too.

    Raises:
        PlanError: the plan's `balance` cannot divide this loader.
        ConfigError: `loader` is no DataLoader, is sharded already, or its batch is too small to divide; or what
            `lengths` gives are no lengths of its samples, or `max_tokens` is too small for one of them.
        Mismatch: the ranks' loaders differ, or their data; raised on every rank.
    """
    here = world()
    if not isinstance(loader, DataLoader):
        raise ConfigError(f"shard: expected a torch.utils.data.DataLoader, got {type(loader).__name__}")
    refuse_divided(loader, ShardedLoader)
    refuse_strange(loader)
    if split and loader.batch_size is not None and loader.batch_size < here.sample_size and max_tokens is None:
        raise ConfigError(
            f"shard: a batch of {loader.batch_size} cannot be split over {here.sample_size} ranks",
            remedy=f"use a batch_size of at least {here.sample_size}",
        )
    samples, problem = agreed_lengths(loader, lengths, max_tokens)
    facts = [*facts_of(loader), ("split", split), ("evaluate", evaluate), ("max_tokens", max_tokens)]
    facts.append(("lengths", str(problem) if problem else None if samples is None else digest_of(samples)))
    require_same(here, "comparing the loaders given to fd.shard", facts, remedy=_SAME_LOADER)
    if problem:
        raise problem
    cut = _cut_of(loader, here, max_tokens, is_split=split)
    buckets = None if samples is None else LengthBuckets(samples, cut, is_sorted=evaluate)
    theirs: Any = type(loader)
    kind: Any = divided_kind(ShardedLoader, theirs)
    made: ShardedLoader[T] = kind.__new__(
        kind
    )  # not by a constructor of the user's: only its class knows the arguments
    order_seed, data = _agreed_seed(loader, here, seed)
    partition = Partition(
        here.sample_rank,
        here.sample_size,
        cut.multiple,
        drop_last=loader.drop_last,
        is_split=split,
        placeholders=not evaluate,
    )
    ShardedLoader.__init__(made, loader, here, partition, order_seed, buckets)
    made._farandole.losses.digest = hashlib.sha256(json.dumps([facts, data]).encode()).hexdigest()[:16]
    return made


_SAME_LOADER = "give the same loader on all ranks: fd.shard divides it"


class ShardedLoader(DataLoader[T_co]):
    """A DataLoader over one rank's share. Made by `shard`; used like any other loader."""

    def __init__(
        self, source: DataLoader[T_co], here: World, partition: Partition, seed: int, buckets: LengthBuckets | None
    ) -> None:
        # What a subclass keeps beside; what torch's own class keeps is made anew below.
        self.__dict__.update({name: value for name, value in vars(source).items() if name != _IS_MADE})
        own = self._farandole = LoaderState(here, partition, seed)
        arguments: dict[str, Any] = {name: getattr(source, name) for name in _KEPT if hasattr(source, name)}
        arguments["generator"] = own.generator
        batch_size = source.batch_size
        if isinstance(source.dataset, IterableDataset):
            if batch_size is None:
                raise ConfigError("shard: a stream without batch_size cannot be divided", remedy="set batch_size")
            arguments["collate_fn"] = divide_stream.collate(source.collate_fn)
            stream: Any = divide_stream(source.dataset, partition)
            stream.keeps_states = has_states(source.dataset)
            own.stream = stream
            DataLoader.__init__(self, stream, batch_size=partition.own_size, **arguments)
        elif batch_size is None and source.batch_sampler is not None:
            own.parts = RankBatches(cast("Iterable[list[int]]", source.batch_sampler), partition, here, seed)
            DataLoader.__init__(self, source.dataset, batch_sampler=own.parts, **arguments)
        elif batch_size is None:
            raise ConfigError("shard: a loader without batches cannot be divided", remedy="set batch_size")
        else:
            own.parts = RankSampler(source.sampler, partition, here, seed, buckets)
            DataLoader.__init__(
                self, source.dataset, batch_size=partition.own_size, sampler=own.parts, **arguments
            )
            # Past torch's refusal to change it: torch's own would cut the rank's samples into equal batches.
            vars(self)["batch_sampler"] = RankBatchSampler(own.parts, partition.own_size)
            if own.parts.has_budget:
                vars(self)["batch_size"] = None
        own.open_shares()

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration be epoch `epoch` (counted by itself otherwise)."""
        own = self._farandole
        own.position.choose_epoch(epoch)
        own.is_chosen = True
        if own.parts is not None:
            own.parts.set_epoch(epoch)
            own.parts.asked_epoch = None  # the position knows it
        theirs = getattr(super(), "set_epoch", None)
        if theirs is not None:  # a subclass that wants to know, too
            theirs(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where this loader stands, to save beside the model: equal on all ranks between two steps.

        Saved in the loop, it resumes after the batch that was drawn last; saved after a whole loop, with the next
        epoch. ``epoch`` and ``batches`` (drawn in it) are for the loop's own use. All values are JSON's.
        """
        own = self._farandole
        asked = None if own.parts is None else own.parts.asked_epoch
        return own.position.state(asked, own.seed, own.saved_shares)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, in the next iteration. To be called on all ranks, with the same state.

        Raises `ConfigError` for what is no state, or one that this loader cannot continue, and `Mismatch` when the
        ranks' states differ; both on every rank. With a sampler of the user's own or `lengths` it shows when the
        next iteration begins whether the epoch's order is that of the state.
        """
        own = self._farandole
        found = read_state(own.world, state)
        own.refuse_state(found, self.num_workers)
        own.position.load(found)
        own.is_chosen = True
        own.seed = found["seed"]
        if own.parts is None:
            self._iterator = None  # workers that live on have the stream where it was

    def __len__(self) -> int:
        """Steps in an epoch on this rank; in a resumed epoch those before are counted, too.

        With `max_tokens` epochs differ: it is that of the current epoch in the loop, else that of the next one.
        """
        own = self._farandole
        if own.parts is None or counts_itself(type(self)):
            return super().__len__()
        if isinstance(own.parts, RankSampler) and own.parts.has_budget:
            return own.budgeted_steps()
        return own.parts.steps()

    # T is the type of a sample; for a type checker, a batch is what torch's default_collate makes of it.
    @overload  # type: ignore[override] # torch says the class of its iterator, whose batches are of any type
    def __iter__(self: ShardedLoader[NoReturn]) -> Iterator[Any]: ...  # fits samples of type Any alone
    @overload
    def __iter__(self: ShardedLoader[torch.Tensor]) -> Iterator[torch.Tensor]: ...
    @overload
    def __iter__(self: ShardedLoader[tuple[torch.Tensor, ...]]) -> Iterator[list[torch.Tensor]]: ...
    @overload
    def __iter__(self: ShardedLoader[dict[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]: ...
    @overload
    def __iter__(self: ShardedLoader[float]) -> Iterator[torch.Tensor]: ...
    @overload
    def __iter__(self: ShardedLoader[str]) -> Iterator[list[str]]: ...
    @overload
    def __iter__(self) -> Iterator[Any]: ...
    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches, telling the reducer the weight of each."""
        return self._farandole.hand_out(super().__iter__(), type(self))

    def _get_iterator(self) -> Any:
        own = self._farandole
        tuned = own.world.session.kept(TunedLoaders)
        if tuned is not None and own.parts is not None and not own.evaluate and not self.persistent_workers:
            self.num_workers = tuned.trials_of(own.number).begin(self.num_workers)
        own.begin_epoch(self.num_workers)
        note_loader(own.world, self, len(worker_cores()) or None, depth_ahead())
        with on_worker_cores(), sparing_workers(self):
            batches = super()._get_iterator()
        return Drawing(batches, own, None if own.world.session.regroup is None else super()._get_iterator)


_IS_MADE = "_DataLoader__initialized"
"""By which torch's class knows that its attributes must not change any more."""

_KEPT = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
    "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order",
)  # fmt: skip


def _cut_of(loader: DataLoader[Any], here: World, max_tokens: int | None, *, is_split: bool) -> Cut:
    """Return how the job's batches are cut."""
    if max_tokens is not None:
        tokens = max_tokens // here.sample_size if is_split else max_tokens
        return Cut(here.sample_size, tokens)
    return Cut((loader.batch_size or 0) * (1 if is_split else here.sample_size), 0)


def _agreed_seed(loader: DataLoader[Any], here: World, seed: int | None) -> tuple[int, list[str]]:
    """Return the seed of the order of the data, and what is known of that; raise `Mismatch` for other data."""
    if seed is None:
        generator = getattr(loader.sampler, "generator", None)
        seed = generator.initial_seed() if generator is not None else torch.initial_seed()
    data = data_of(loader.dataset) if here.size > 1 or here.is_apart else []
    said = all_gather_json(here, "seed and data", [int(seed), data])
    refuse_other_data(here, loader.dataset, [each for _, each in said])
    return int(said[0][0]), data
