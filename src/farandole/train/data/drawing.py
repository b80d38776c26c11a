"""The iterations of a divided loader: which epoch each one is, its place in it, and the weight of each batch."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ...comm.batch_weight import Origin
from ...comm.world.session import DividedLoops, RankChange
from ...comm.world.world import World
from ...core.vocabulary.errors import CommError, ConfigError, PlanError
from ...core.vocabulary.events import DataWait
from ...parallel.seeds import kept_generators
from ..balance import ShareChanges, balancer_of
from .loader_watch import leave_out
from .partition import Part, Partition
from .position import EpochRows, LatestLoop, LoaderPosition, LoopPlace
from .rank_sampler import EpochPlan, RankBatches, RankSampler, RoundsPlan, Step, seed_of
from .stream import ShardedBatch, divide_stream, new_reading, note_reading
from .told_later import Handover, drawn_ahead, tell
from .worker_cores import TunedLoaders


class LoaderState:
    """What a divided loader keeps for itself: apart, as a subclass may have attributes of any name."""

    def __init__(self, here: World, partition: Partition, seed: int) -> None:
        self.world = here
        self.partition = partition
        self.position = LoaderPosition()
        self.generator = torch.Generator()
        """From which torch seeds workers. See [Note: random numbers by place]."""
        self._seed = seed
        self.parts: RankSampler | RankBatches | None = None
        self.stream: divide_stream | None = None
        self.latest = here.session.keep(LatestLoop, partial(_follow_loops, here))
        self.is_chosen = False
        """Whether `set_epoch` said which epoch comes next."""
        self.loop: Loop | None = None
        """The iteration that began last."""
        self.drawn: Loop | None = None
        """The iteration that drew a batch last."""
        self._upcoming: EpochPlan | None = None
        self.draws_alone = threading.Lock()
        """Held while a batch is drawn: a thread of `fd.prefetch` and another loop may do so at a time."""
        self.losses = LostSamples(self)
        self.number = self.latest.add(self.losses)

    @property
    def evaluate(self) -> bool:
        """Whether samples are divided without placeholders."""
        return not self.partition.placeholders

    @property
    def seed(self) -> int:
        """The seed of shuffled epochs."""
        return self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._seed = seed
        if self.parts is not None:
            self.parts.seed = seed

    @property
    def changes(self) -> ShareChanges | None:
        """Changes of the shares of the ranks; None: these are equal."""
        return self.parts.changes if isinstance(self.parts, RankSampler) else None

    def refuse_state(self, state: Mapping[str, Any], workers: int) -> None:
        """Raise `ConfigError` for the middle of an epoch that cannot be continued; on all ranks alike."""
        reading = state["stream"]
        if not state["used"]:
            return
        if (reading is None) != (self.stream is None):
            kinds = ("dataset with indexes", "stream") if reading is None else ("stream", "dataset with indexes")
            raise ConfigError(f"load_state_dict: the state is of a {kinds[0]}, and this is a {kinds[1]}")
        if self.parts is not None and isinstance(self.parts, RankSampler):
            self.parts.refuse_state(state)
        if self.stream is not None and reading is not None:
            self.stream.refuse_state(state["used"], reading, workers)

    def budgeted_steps(self) -> int:
        """Return the steps of the current epoch, or of the next one where none goes on."""
        assert isinstance(self.parts, RankSampler), "only batches of single samples have a budget of tokens"
        drawn, place = self.drawn, self.position.current
        if drawn is not None and place is drawn.place and not place.is_complete:
            assert isinstance(drawn.plan, EpochPlan), "a sampler of single samples makes its plans"
            return drawn.plan.total_steps
        return self._next_plan(self.parts).total_steps

    def _next_plan(self, parts: RankSampler) -> EpochPlan:
        """Return the plan of the next epoch: the same until it begins."""
        place = self.position.upcoming()
        if parts.asked_epoch is not None and parts.asked_epoch != place.epoch:
            place = LoopPlace(parts.asked_epoch)
        known = self._upcoming
        if known is None or (known.seed, known.place.epoch, known.begin) != (parts.seed, place.epoch, place.used):
            self._upcoming = known = parts.make_plan(place)
        return known

    def hand_out(self, batches: Iterator[Any], kind: type[Any]) -> Iterator[Any]:
        """Yield `batches`: those of `Drawing`, or what a subclass makes of them."""
        end = _LoopEnd(self)
        ahead = drawn_ahead()
        if ahead is not None:
            ahead.ends.append(end)
        try:
            for batch in batches:
                if self.drawn is None:
                    raise no_draw(kind, "yields batches that it does not get from super().__iter__()")
                end.loop = self.drawn
                yield batch
        finally:
            tell(lambda _: end())

    def _refuse_other_mesh(self) -> None:
        here, mine = self.world, self.partition
        if (here.sample_rank, here.sample_size) != (mine.rank, mine.size) and not here.closed:
            raise ConfigError(
                f"this loader was divided over {mine.size} ranks, and by the plan of fd.distribute "
                f"({here.degrees}) {here.sample_size} ranks train on different samples",
                remedy="call fd.shard after fd.distribute, or give the plan to the launcher: farandole run --plan",
            )

    def begin_epoch(self, workers: int) -> None:
        """Torch is about to draw the batches of another epoch."""
        parts, ahead = self.parts, drawn_ahead()
        if ahead is not None and not ahead.may_begin:
            raise ConfigError(
                "fd.prefetch: what it was given begins another epoch of a loader of fd.shard, in the thread that "
                "draws ahead: the loop is still in the epoch before, where a checkpoint resumes",
                remedy="prefetch the loader itself, inside: for batch in fd.prefetch(loader): yield batch",
            )
        self._refuse_other_mesh()
        if parts is not None and parts.asked_epoch is not None:
            self.position.choose_epoch(parts.asked_epoch)
            self.is_chosen, parts.asked_epoch = True, None
        self.open_shares()
        place = self.position.begin()
        if self.changes is not None:
            self._begin_shares(place, self.changes)
        goes_by_epoch = self.is_chosen or (parts is not None and parts.is_shuffled)
        self.is_chosen = False
        self.generator.manual_seed(seed_of(self.seed, place.epoch, self.partition.rank))
        plan = None
        if parts is not None:
            plan = parts.plan = parts.make_plan(place)
        elif self.stream is not None:
            self.stream.resume = self.stream.continued(place.stream)
            if self.stream.resume is None:
                place.stream = new_reading(workers, self.partition.whole)
        origin = Origin(self.number, place.epoch, place.epoch if goes_by_epoch else 0)
        self.loop = Loop(place, plan, origin)
        is_equal = parts is not None and not parts.may_be_unequal(place)
        if not self.evaluate and self.world.size > 1 and not is_equal:
            self.world.session.batch_weight.watches = True

    def open_shares(self) -> None:
        """Divide in unequal shares, if a plan asks for it. Raises `PlanError` where this loader cannot."""
        found = None if self.evaluate or self.changes is not None else balancer_of(self.world)
        if found is None:
            return
        parts, balance = self.parts, found.keys
        whole, cap = self.partition.whole, balance.cap * self.partition.size
        kind = ""
        if self.stream is not None:
            kind = "a stream (an IterableDataset)"
        elif not isinstance(parts, RankSampler):
            kind = f"batches of a {type(getattr(parts, 'source', None)).__name__} of the script's own"
        elif parts.has_budget:
            kind = "max_tokens, a number of tokens for each rank"
        if kind:
            raise PlanError(
                f'plan: balance = "{balance.balance}" divides batches of single samples, and fd.shard was given '
                f"{kind}",
                remedy="give a DataLoader of a dataset with indexes and batch_size, or leave balance out",
            )
        if 0 < cap < whole:
            raise PlanError(
                f"plan: balance_cap = {balance.cap}, and {self.partition.size} ranks of at most so many samples "
                f"hold {cap}, but a batch of all ranks has {whole}",
                remedy=f"set balance_cap to {-(-whole // self.partition.size)} or more, or make the batch smaller",
            )
        assert isinstance(parts, RankSampler), "all others were refused"
        parts.changes = found.open_loader(self.number, whole)

    def saved_shares(self, iteration: int, used: int) -> list[Any]:
        """Return what a state keeps of shares that were measured; nothing of others."""
        found = balancer_of(self.world)
        if self.changes is None or found is None or not found.is_measured:
            return []
        return self.changes.state(iteration, used)

    def _begin_shares(self, place: LoopPlace, changes: ShareChanges) -> None:
        place.iteration = changes.begin()
        found, loaded = balancer_of(self.world), place.shares
        place.shares = ()
        if found is not None and found.is_measured and loaded and len(loaded[0][1]) == self.partition.size:
            found.adopt(changes.load(loaded, found.keys.cap))


class Loop(NamedTuple):
    """One iteration."""

    place: LoopPlace
    plan: EpochPlan | RoundsPlan | None
    """None: of a stream."""
    origin: Origin


# Where ranks may be lost, and the others go on in the epoch.
#
# [Note: samples of a lost rank] A rank that is lost takes the samples of its last batch with it, whose gradients
# are gone. All others know which these are, and move them behind what was used of the epoch's order: so what is to
# come, which is divided over the ranks of now, begins with them. Batches that torch's workers made ahead are
# dropped.


Moved = tuple[tuple[int, tuple[int, ...]], ...]
"""See `LoopPlace.moved`."""


class _Undivided(NamedTuple):
    """An iteration as it was when a step began in which ranks were lost, perhaps several times."""

    plan: EpochPlan
    moved: Moved
    size: int
    """Ranks then."""
    ranks: tuple[int, ...]
    """Numbers then of the ranks of now."""


class LostSamples:
    """What one loader does about ranks that are lost. A `FollowsChange`."""

    def __init__(self, own: LoaderState) -> None:
        self._seen_own = weakref.ref(own)
        self.digest = ""
        """A hash of what this rank gave to `fd.shard`, and of its data."""
        self._drawing: weakref.ref[Drawing] | None = None
        self._is_ahead = False
        """Whether batches are drawn by a thread, before the loop is there."""
        self._sure: tuple[LoopPlace | None, int] = (None, 0)
        """The iteration of the last sure step, and how many batches it had handed out then."""
        self._undivided: _Undivided | None = None
        """By what the batches since that step were divided, if ranks were lost in this one."""

    def draws(self, drawing: Drawing) -> None:
        """An iteration of torch's begins."""
        self._drawing, self._is_ahead = weakref.ref(drawing), drawn_ahead() is not None

    def note_exchange(self) -> None:
        """See `FollowsChange`."""
        own, drawing = self._seen_own(), None if self._drawing is None else self._drawing()
        place = None if own is None else own.position.current
        self._sure = place, 0 if place is None else place.batches
        if drawing is not None:
            drawing.catch_up()
        if drawing is None or not drawing.is_behind:
            self._undivided = None

    def under_way(self) -> list[int]:
        """See `FollowsChange`."""
        own = self._seen_own()
        loop, place = (None, None) if own is None else (own.drawn, own.position.current)
        if own is None or own.evaluate or loop is None or place is not loop.place or place.is_complete:
            return []
        before = 0 if loop.plan is None else loop.plan.batches_before
        return [place.epoch, place.batches, self._sure[1] if self._sure[0] is place else before]

    def standing(self) -> list[Any]:
        """See `FollowsChange`."""
        own = self._seen_own()
        if own is None or own.evaluate:
            return []
        asked = None if own.parts is None else own.parts.asked_epoch
        state = own.position.state(asked, own.seed, lambda *_: [])
        return [*(state[name] for name in ("epoch", "batches", "used", "seed")), self.digest]

    def why_whole(self) -> str:
        """See `FollowsChange`."""
        own, place = self._seen_own(), self.under_way()
        if own is None or not (place or own.stream is not None):
            return ""
        if not (why := self._why_not(own)) and place[1] > place[2]:
            why = "a batch that the loop has drawn ahead"
        return why and f"{why} cannot be divided anew"

    def follow(self, change: RankChange, place: Sequence[int]) -> None:
        """See `FollowsChange`. See [Note: samples of a lost rank]."""
        own = self._seen_own()
        if own is None:
            return
        here, drawing = own.world, None if self._drawing is None else self._drawing()
        if drawing is not None:
            drawing.catch_up()
        loop = own.loop
        own.partition, parts = own.partition.over(here.sample_rank, here.sample_size), own.parts
        if parts is not None:
            parts.divide(own.partition)
        if own.stream is not None or (place and self._why_not(own)):
            raise CommError(
                f"an epoch goes on without a lost rank, and {self._why_not(own)} cannot be divided anew",
                rank=here.job_rank,
                operation="redoing a step",
                remedy="go on from the last checkpoint (farandole run --restarts 3)",
            )
        if not place or loop is None or drawing is None:
            return
        _, batches, sure = place
        assert isinstance(loop.plan, EpochPlan), "others were refused"
        ranks = tuple(range(change.size))
        before = self._undivided or _Undivided(loop.plan, loop.place.moved, change.size, ranks)
        before = before._replace(ranks=tuple(before.ranks[each] for each in change.left))
        self._undivided = before if batches > sure else None
        gone = sorted(set(range(before.size)) - set(before.ranks))
        end, lost = before.plan.lost_with(gone, range(sure, batches))
        moved = (*before.moved, (end, tuple(lost))) if lost else before.moved
        drawing.go_on_after(batches, end - len(lost), moved)

    def _why_not(self, own: LoaderState) -> str:
        """Return what of the epoch that goes on cannot be divided anew; the same on all ranks. Empty: nothing."""
        if own.stream is not None:
            return "a stream"
        if self._is_ahead:
            return "what fd.prefetch has drawn"
        if own.position.open_loops > 1:
            return "a loader with several loops"
        if own.parts is None or not own.parts.is_known or own.parts.has_buckets:
            return "an order of the script's own, or by lengths,"
        return ""


def _follow_loops(here: World) -> LatestLoop:
    made = LatestLoop()
    here.session.keep(DividedLoops, lambda: made)
    here.session.follow_change(made.follow)
    return made


class _LoopEnd:
    """What is to be done once when the loop over a loader is left."""

    def __init__(self, own: LoaderState) -> None:
        self._own = own
        self.loop: Loop | None = None
        """That of the batch that was drawn last."""
        self._is_done = False

    def __call__(self) -> None:
        if self._is_done:
            return
        self._is_done = True
        own, loop = self._own, self.loop
        if own.latest.rows is not None and own.latest.rows.loader == own.number:
            own.latest.rows.has_ended = True
        if loop is not None:
            own.position.ended(loop.place, is_complete=False)
            if not own.evaluate:
                own.world.session.batch_weight.loop_ends(loop.origin)


class Drawing:
    """Torch's iterator of one epoch, which tells the weight of each batch that it hands out.

    See [Note: drawn ahead, told later] in `told_later`.
    """

    def __init__(self, batches: Any, own: LoaderState, make: Callable[[], Any] | None = None) -> None:
        """`make`: where ranks may be lost, returns torch's iterator of the batches from here on."""
        self._batches, self._make = batches, make
        self._own = own
        self._loop: Loop
        self._steps: Iterator[Step] | None
        self._next: tuple[int, int, Moved] | None = None
        """After how many batches other ranks divide the epoch, from where on, and what was moved there."""
        self._start()

    def go_on_after(self, batches: int, used: int, moved: Moved) -> None:
        """Divide over the ranks of now from after so many batches on. See [Note: samples of a lost rank]."""
        self._next = batches, used, moved
        self.catch_up()

    def catch_up(self) -> None:
        """Divide anew what is to be, if all batches before that are drawn."""
        if self._next is not None and not self.is_behind:
            self._divide_anew()

    @property
    def is_behind(self) -> bool:
        """Whether a batch is still to be drawn as ranks divided it that are lost."""
        return self._next is not None and self._loop.place.batches < self._next[0]

    def _divide_anew(self) -> None:
        own, place, then, self._next = self._own, self._loop.place, self._next, None
        assert then is not None, "it is to be divided"
        assert self._make is not None, "ranks may be lost"
        assert own.parts is not None, "a stream is read to its end"
        _, place.used, place.moved = then
        plan = own.parts.plan = own.parts.make_plan(place)
        own.loop = own.drawn = self._loop = Loop(place, plan, self._loop.origin)
        own.generator.manual_seed(seed_of(own.seed, place.epoch, own.partition.rank))
        self._steps = plan.steps()
        self._batches = self._make()
        leave_out(self._batches)
        if own.world.size > 1 and own.parts.may_be_unequal(place):
            own.world.session.batch_weight.watches = True

    def _start(self) -> None:
        loop = self._own.loop
        assert loop is not None, "an iteration has begun"
        self._loop = loop
        self._steps = None if loop.plan is None else loop.plan.steps()
        self._rows = EpochRows(self._own.number, loop.place.epoch)
        self._own.losses.draws(self)
        leave_out(self._batches)
        if self._own.stream is not None:
            with kept_generators():  # what is read in this process for nothing must not draw from them
                for _ in range(self._own.stream.batches_to_drop(loop.place.used)):
                    batch = next(self._batches, None)
                    if isinstance(batch, ShardedBatch) and not batch.is_empty:
                        self._note_reading(batch)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> Any:
        begin, cpu = time.monotonic(), time.thread_time()
        self.catch_up()
        own, loop = self._own, self._loop
        try:
            with own.draws_alone:
                if own.parts is not None:
                    own.parts.plan = loop.plan  # another loop may have begun meanwhile
                drawn = next(self._batches)
        except StopIteration:
            tell(self._epoch_ends)
            raise
        own.drawn = loop
        if isinstance(drawn, ShardedBatch):
            batch, part, used = drawn.batch, drawn.part, own.partition.whole
        else:
            assert self._steps is not None, "a loader that is no stream has steps"
            batch, (part, used) = drawn, next(self._steps)
        tell(partial(self._hand_out, drawn, batch, part, used), begin, cpu)
        return batch

    def _hand_out(self, drawn: Any, batch: Any, part: Part, used: int, handover: Handover) -> None:
        own, loop = self._own, self._loop
        own.latest.rows = self._rows
        if isinstance(drawn, ShardedBatch):
            self._note_reading(drawn)
        own.position.handed_out(loop.place, used)
        self._rows.add(part.samples)
        if own.evaluate:
            return
        session, wait = own.world.session, handover.wait()
        session.batch_weight.hand_out(handover.tensors_of(batch), part.factor, part.samples, loop.origin)
        session.recorder.record(DataWait(*wait[:2], part.samples, wait.cpu_seconds))
        tuned = session.kept(TunedLoaders)
        if tuned is not None:
            tuned.trials_of(own.number).note(*wait[:2])

    def _epoch_ends(self, _: Handover) -> None:
        self._own.position.ended(self._loop.place, is_complete=True)
        self._rows.has_ended = True
        self._own.latest.rows = self._rows

    def _note_reading(self, batch: ShardedBatch) -> None:
        assert self._loop.place.stream is not None, "it is set where the iteration begins"
        note_reading(self._loop.place.stream, batch)

    def _reset(self, loader: DataLoader[Any], *arguments: Any) -> None:
        """Begin the next epoch: torch keeps the iterator of persistent workers."""
        self._own.begin_epoch(loader.num_workers)
        self._batches._reset(loader, *arguments)
        self._start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


# What kind of DataLoader `fd.shard` was given: a subclass keeps its behaviour, or is refused by name.
#
# [Note: loaders of other classes] The divided loader is of a class made of ours and the user's, so that an
# ``__iter__`` of the user's runs, and ``super().__iter__()`` in it gives the batches of this rank. A loader that
# gets its batches elsewhere cannot be divided like this: one that keeps an iterator from its constructor, or whose
# batch sampler was replaced.


_PLAIN = "give a plain DataLoader of the same dataset, and do in the loop what the class does to batches"


@lru_cache(maxsize=64)
def divided_kind(ours: type[Any], theirs: type[Any]) -> type[Any]:
    """Return the class of a loader that is both `ours` and `theirs`."""
    if theirs is DataLoader:
        return ours
    members = {"__module__": theirs.__module__, "__qualname__": theirs.__qualname__, "__doc__": theirs.__doc__}
    try:
        return type(theirs.__name__, (ours, theirs), members)
    except TypeError as problem:
        raise ConfigError(
            f"shard: cannot divide a loader of class {theirs.__name__}: {problem}", remedy=_PLAIN
        ) from None


def counts_itself(kind: type[Any]) -> bool:
    """Return whether a divided loader's class has a ``__len__`` of the user's."""
    ours_and_theirs = [each for each in kind.__mro__ if "__len__" in vars(each) and issubclass(each, DataLoader)]
    return len(ours_and_theirs) > 2  # ours and torch's are always there


def refuse_divided(loader: DataLoader[Any], ours: type[Any]) -> None:
    """Raise `ConfigError` for a loader whose samples are divided over the ranks already."""
    found: Any = loader
    for _ in range(4):  # samplers within samplers
        if isinstance(found, (ours, DistributedSampler)) or _names_many(found):
            raise ConfigError(
                f"shard: the loader is divided already (by a {type(found).__name__})",
                remedy="give the plain loader, as one process would use it",
            )
        inner = getattr(found, "batch_sampler", None) if found is loader else None
        inner = inner if inner is not None else getattr(found, "sampler", None)
        if inner is None:
            return
        found = inner


def _names_many(found: Any) -> bool:
    """Return whether a sampler of another library says how many take part."""
    return any(
        isinstance(n := getattr(found, name, 1), int) and n > 1 for name in ("num_replicas", "num_processes")
    )


def refuse_strange(loader: DataLoader[Any]) -> None:
    """Raise `ConfigError` for a subclass that cannot run over other batches than those it was made for."""
    name = type(loader).__name__
    if any(each.__module__.partition(".")[0] == "torchdata" for each in type(loader).__mro__):
        raise ConfigError(
            f"shard: a {name} of torchdata keeps a place of its own, which knows nothing of ranks",
            remedy="give a DataLoader of torch.utils.data: the sharded loader has state_dict and load_state_dict",
        )
    for attribute, value in vars(loader).items():
        if isinstance(value, _BaseDataLoaderIter) and attribute != "_iterator":
            raise no_draw(type(loader), f"keeps an iterator from its constructor, in its attribute {attribute!r}")
    replaced = type(loader.batch_sampler)
    if loader.batch_size is not None and replaced not in (BatchSampler, type(None)):
        raise ConfigError(
            f"shard: the batch_sampler of this {name} was replaced by a {replaced.__name__} after it was made",
            remedy="give a plain DataLoader with batch_size, or one made with batch_sampler=",
        )


def no_draw(kind: type[Any], why: str) -> ConfigError:
    """Return the error about a class whose batches do not come from torch's own iteration."""
    return ConfigError(f"shard: a loader of class {kind.__name__} {why}: it cannot be divided", remedy=_PLAIN)


def facts_of(loader: DataLoader[Any]) -> list[tuple[str, Any]]:
    """Return what must be the same on all ranks, so that each takes its part of the same batches."""
    dataset, batches = loader.dataset, loader.batch_sampler
    facts: list[tuple[str, Any]] = [
        ("class of the loader", type(loader).__name__),
        ("class of the dataset", type(dataset).__name__),
        ("batch_size", loader.batch_size),
        ("drop_last", loader.drop_last),
    ]
    if isinstance(dataset, IterableDataset):
        return facts
    facts.append(("length of the dataset", _length(dataset)))
    if loader.batch_size is None and batches is not None:
        return [*facts, ("class of the batch_sampler", type(batches).__name__), ("batches", _length(batches))]
    sampler = loader.sampler
    return [*facts, ("class of the sampler", type(sampler).__name__), ("samples", _length(sampler))]


def _length(value: Any) -> int | None:
    with suppress(TypeError, NotImplementedError):
        if isinstance(value, Sized):
            return len(value)
    return None
