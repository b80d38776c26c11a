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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn, TypeVar, cast, overload

import torch
from torch.utils.data import DataLoader, IterableDataset

from ...comm.batch_weight.drawn_batches import Origin
from ...comm.world.store_sync import all_gather_json, require_same
from ...comm.world.world import World, world
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.events import DataWait
from ...parallel.instrument.training_facts import note_loader
from .loader_kind import counts_itself, divided_kind, facts_of, no_draw, refuse_divided, refuse_strange
from .loader_watch import leave_out
from .partition import Partition
from .position import EpochRows, LatestLoop, LoaderPosition, read_state
from .rank_sampler import RankBatches, RankSampler
from .stream import ShardedBatch, divide_stream
from .worker_cores import on_worker_cores, worker_cores

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


def shard(
    loader: DataLoader[T], *, split: bool = False, evaluate: bool = False, seed: int | None = None
) -> ShardedLoader[T]:
    """Return a loader of this rank's shard of the batches of `loader`.

    A subclass of DataLoader stays one; its own ``__iter__`` runs over the batches of this rank.

    Args:
        loader: a DataLoader, the same on all ranks. Its ``batch_size`` is the batch of one rank.
        split: if True, ``batch_size`` is the global batch, which is divided over the ranks.
        evaluate: if True, samples are divided without placeholders, and gradient weights are not changed.
        seed: seed of the order of shuffled epochs; by default rank 0's ``torch.initial_seed()``.

    Returns:
        The sharded loader. Each iteration is the next epoch; ``set_epoch`` selects another, and ``state_dict`` and
        ``load_state_dict`` resume a run, in the middle of an epoch too.

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
    made: ShardedLoader[T] = kind.__new__(
        kind
    )  # not by a constructor of the user's: only its class knows the arguments
    order_seed = _agreed_seed(loader, here, seed)
    ShardedLoader.__init__(made, loader, here, split=split, evaluate=evaluate, seed=order_seed)
    return made


_SAME_LOADER = "give the same loader on all ranks: fd.shard divides it"


class ShardedLoader(DataLoader[T_co]):
    """A DataLoader over one rank's share. Made by `shard`; used like any other loader."""

    def __init__(self, source: DataLoader[T_co], here: World, *, split: bool, evaluate: bool, seed: int) -> None:
        # What a subclass keeps beside; what torch's own class keeps is made anew below.
        self.__dict__.update({name: value for name, value in vars(source).items() if name != _IS_MADE})
        own = self._farandole = _Own(here, evaluate, seed)
        arguments: dict[str, Any] = {name: getattr(source, name) for name in _KEPT if hasattr(source, name)}
        batch_size = source.batch_size
        whole = 0 if batch_size is None else batch_size * (1 if split else here.size)
        partition = Partition(here.rank, here.size, whole, drop_last=source.drop_last, placeholders=not evaluate)
        if isinstance(source.dataset, IterableDataset):
            if batch_size is None:
                raise ConfigError("shard: a stream without batch_size cannot be divided", remedy="set batch_size")
            arguments["collate_fn"] = divide_stream.collate(source.collate_fn)
            stream: Any = divide_stream(source.dataset, partition)
            own.stream_unit = whole
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
        own = self._farandole
        own.position.choose_epoch(epoch)
        own.is_chosen = True
        if own.parts is not None:
            own.parts.set_epoch(epoch)
        theirs = getattr(super(), "set_epoch", None)
        if theirs is not None:  # a subclass that wants to know, too
            theirs(epoch)

    def state_dict(self) -> dict[str, int]:
        """Return where this loader stands, to save beside the model: equal on all ranks between two steps.

        Saved in the loop, it resumes after the batch that was drawn last; saved after a whole loop, with the next
        epoch. ``epoch`` and ``batches`` (drawn in it) are for the loop's own use.
        """
        own = self._farandole
        asked = None if own.parts is None else own.parts.asked_epoch
        return own.position.state(asked, own.seed)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where `state` was taken, in the next iteration. To be called on all ranks, with the same state.

        Raises `ConfigError` for what is no state, or one that this loader cannot continue, and `Mismatch` when the
        ranks' states differ; both on every rank.
        """
        own = self._farandole
        found = read_state(own.world, state)
        own.refuse_state(found)
        self.set_epoch(found["epoch"])
        own.position.resume = found["epoch"], found["batches"], found["used"]
        own.seed = found["seed"]

    def __len__(self) -> int:
        """Steps in an epoch on this rank; in a resumed epoch those before are counted, too."""
        parts = self._farandole.parts
        if parts is None or counts_itself(type(self)):
            return super().__len__()
        return parts.steps()

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
        self._farandole.begin_epoch()
        note_loader(self._farandole.world, self, len(worker_cores()) or None)
        # Torch draws a seed for its workers at the begin of each epoch. A resumed epoch had begun before the
        # random numbers were saved: drawn again, all that come after it would be others.
        is_resumed = self._farandole.position.batches > 0
        with on_worker_cores(), _undone_draws(self.generator) if is_resumed else nullcontext():
            batches = super()._get_iterator()
        return _Drawing(batches, self._farandole)


class _Own:
    """What a divided loader keeps for itself: apart, as a subclass may have attributes of any name."""

    def __init__(self, here: World, evaluate: bool, seed: int) -> None:
        self.world = here
        self.evaluate = evaluate
        self.position = LoaderPosition()
        self.stream_unit = 0
        """Samples of a batch of all ranks, of a stream."""
        self._seed = seed
        self.parts: RankSampler | RankBatches | None = None
        self.draws = 0
        self.latest = here.session.keep(LatestLoop, LatestLoop)
        self.is_chosen = False
        """Whether `set_epoch` said which epoch comes next."""
        self._goes_by_epoch = False
        """Whether the order of the current epoch's samples goes by its number."""
        self.number = self.latest.loaders
        self.latest.loaders += 1

    @property
    def origin(self) -> Origin:
        return Origin(self.number, self.position.epoch, self.position.epoch if self._goes_by_epoch else 0)

    @property
    def unit(self) -> int:
        """How far one batch goes in the job's order."""
        return self.stream_unit if self.parts is None else self.parts.unit

    @property
    def seed(self) -> int:
        """The seed of shuffled epochs."""
        return self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._seed = seed
        if self.parts is not None:
            self.parts.seed = seed

    def refuse_state(self, state: dict[str, int]) -> None:
        """Raise `ConfigError` for the middle of an epoch that cannot be continued; on all ranks alike."""
        if not state["used"]:
            return
        if self.parts is not None and not self.parts.is_known:
            raise ConfigError(
                f"load_state_dict: the order of a {type(self.parts.source).__name__} is not known from the epoch, "
                f"so epoch {state['epoch']} cannot be continued after {state['batches']} batches",
                remedy="save the state at the end of an epoch, or shuffle with shuffle=True",
            )
        if self.parts is None and state["used"] % self.unit:
            raise ConfigError(
                f"load_state_dict: {state['used']} samples of the stream were used, which is no number of batches "
                f"of {self.unit}",
                remedy="resume with the same batch size and number of ranks",
            )

    def hand_out(self, batches: Iterator[Any], kind: type[Any]) -> Iterator[Any]:
        """Yield `batches`: those of `_Drawing`, or what a subclass makes of them."""
        try:
            for batch in batches:
                if not self.draws:
                    raise no_draw(kind, "yields batches that it does not get from super().__iter__()")
                yield batch
        finally:
            if self.latest.rows is not None and self.latest.rows.loader == self.number:
                self.latest.rows.has_ended = True
            if not self.evaluate:
                self.world.session.batch_weight.loop_ends(self.origin)

    def begin_epoch(self) -> None:
        """Torch is about to draw the batches of another epoch."""
        epoch = self.position.epoch + 1
        if self.parts is not None:
            asked, self.parts.asked_epoch = self.parts.asked_epoch, None
            epoch = epoch if asked is None else asked
            self.is_chosen = self.is_chosen or asked is not None
        self._goes_by_epoch = self.is_chosen or (self.parts is not None and self.parts.is_shuffled)
        self.is_chosen = False
        used = self.position.begin(epoch)
        if self.parts is not None:
            self.parts.epoch, self.parts.first = epoch, used
        if not self.evaluate and self.world.size > 1 and (self.parts is None or self.parts.may_be_unequal):
            self.world.session.batch_weight.watches = True


@contextmanager
def _undone_draws(own: torch.Generator | None) -> Iterator[None]:
    generator = torch.default_generator if own is None else own
    state = generator.get_state()
    try:
        yield
    finally:
        generator.set_state(state)


class _Drawing:
    """Torch's iterator of one epoch, which tells the weight of each batch that it hands out."""

    def __init__(self, batches: Any, own: _Own) -> None:
        self._batches = batches
        self._own = own
        self._start()

    def _start(self) -> None:
        self._shares = None if self._own.parts is None else self._own.parts.shares()
        self._origin = self._own.origin
        self._rows = EpochRows(self._own.number, self._origin.epoch)
        leave_out(self._batches)
        if self._own.parts is None:  # a stream is read up to where it was
            for _ in range(self._own.position.used // self._own.unit):
                next(self._batches, None)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> Any:
        begin, cpu = time.monotonic(), time.thread_time()
        own = self._own
        try:
            batch = next(self._batches)
        except StopIteration:
            own.position.is_complete = self._rows.has_ended = True
            own.latest.rows = self._rows
            raise
        own.draws += 1
        own.position.handed_out(own.unit)
        own.latest.rows = self._rows
        if isinstance(batch, ShardedBatch):
            batch, part = batch.batch, batch.part
        else:
            assert self._shares is not None, "a loader that is no stream has shares"
            part = next(self._shares)
        self._rows.add(part.samples)
        if not own.evaluate:
            own.world.session.batch_weight.hand_out(batch, part.factor, part.samples, self._origin)
            used = time.thread_time() - cpu
            own.world.session.recorder.record(DataWait(begin, time.monotonic(), part.samples, used))
        return batch

    def _reset(self, loader: ShardedLoader[Any], *arguments: Any) -> None:
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


def _agreed_seed(loader: DataLoader[Any], here: World, seed: int | None) -> int:
    if seed is None:
        generator = getattr(loader.sampler, "generator", None)
        seed = generator.initial_seed() if generator is not None else torch.initial_seed()
    return int(all_gather_json(here, "seed of the data order", int(seed))[0])
