"""Where a divided loader stands: its epoch, what it has handed out of it, and where a resumed epoch begins.

[Note: epochs and resuming] Every iteration is the next epoch, and `set_epoch` says which one instead. A state
holds the epoch, how far the job's order was used, and the seed of the order: the rest of the epoch then comes as
it would have come, also on another number of ranks. The order itself is not kept. It is drawn again, and where
that is not sure to give the same (a sampler of the user's own, lengths), the state has a digest of it: another
order is refused, and not continued at a place that means nothing in it.

Each iteration has a place of its own. The state is that of the iteration that began or handed out a batch last.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakValueDictionary

from ...comm.world.session import DividedLoops, RankChange
from ...comm.world.store_sync import require_same
from ...comm.world.world import World
from ...core.vocabulary.errors import ConfigError
from ..balance import is_share_state
from .stream import stream_state

_VERSION = 2
_NUMBERS = ("version", "epoch", "batches", "used", "seed", "next_epoch", "samples", "order")
_KEYS = {*_NUMBERS, "cuts", "stream"}
T = TypeVar("T")


@dataclass
class EpochRows:
    """What an epoch has handed out on this rank, for those who bring its results together (`fd.gather`)."""

    loader: int
    epoch: int
    runs: list[list[int]] = field(default_factory=list)
    """Samples that count in a batch, and how many batches in succession have so many."""
    batches: int = 0
    is_placeholder: bool = False
    """Whether the last batch counts for nothing."""
    has_ended: bool = False

    def add(self, samples: int) -> None:
        """Note a batch of `samples` that count."""
        self.batches += 1
        self.is_placeholder = samples == 0
        if self.runs and self.runs[-1][0] == samples:
            self.runs[-1][1] += 1
        else:
            self.runs.append([samples, 1])


class FollowsChange(Protocol):
    """A divided loader, where ranks may be lost."""

    def note_exchange(self) -> None:
        """See `DividedLoops`."""

    def under_way(self) -> list[int]:
        """Return the epoch that goes on, its batches so far, and those of them in sure steps; empty: none does."""

    def standing(self) -> list[Any]:
        """Return where it would go on: epoch, batches, samples, seed, and a digest of the data.

        Empty for one that evaluates.
        """

    def why_whole(self) -> str:
        """See `DividedLoops`."""

    def follow(self, change: RankChange, place: Sequence[int]) -> None:
        """Divide over other ranks. `place`: what `under_way` is on ranks that are not behind."""


@dataclass
class LatestLoop(DividedLoops):
    """The loop over a divided loader that drew a batch, or ended, last. One a session; its `DividedLoops`."""

    rows: EpochRows | None = None
    loaders: int = 0
    """How many were divided: the same number on all ranks."""
    _alive: WeakValueDictionary[int, FollowsChange] = field(default_factory=WeakValueDictionary)

    def add(self, loader: FollowsChange) -> int:
        """Return the number of one more loader."""
        self._alive[self.loaders] = loader
        self.loaders += 1
        return self.loaders - 1

    def note_exchange(self) -> None:
        """See `DividedLoops`."""
        for loader in self._alive.values():
            loader.note_exchange()

    def under_way(self) -> list[Any]:
        """See `DividedLoops`."""
        found = [[number, *loader.under_way()] for number, loader in sorted(self._alive.items())]
        return [each for each in found if len(each) > 1]

    def standing(self) -> list[Any]:
        """See `DividedLoops`."""
        found = [[number, *loader.standing()] for number, loader in sorted(self._alive.items())]
        return [each for each in found if len(each) > 1]

    def why_whole(self) -> str:
        """See `DividedLoops`."""
        return next(filter(None, (loader.why_whole() for _, loader in sorted(self._alive.items()))), "")

    def follow(self, change: RankChange) -> None:
        """Let all loaders divide over other ranks."""
        places = {number: place for number, *place in change.loops}
        for number, loader in sorted(self._alive.items()):
            loader.follow(change, places.get(number, ()))


class CutAt(NamedTuple):
    """From where in an epoch its order is cut like this. See `length_buckets.Cut`."""

    multiple: int
    tokens: int
    begin: int
    order: int = 0
    """A digest of the order that it makes; 0: not drawn yet."""


@dataclass
class LoopPlace:
    """The place of one iteration."""

    epoch: int
    batches: int = 0
    """Batches handed out in the epoch, those before a resume included."""
    used: int = 0
    """How far the job's order is used: in samples, or in batches of the user's batch sampler."""
    samples: int = 0
    """How long the order is; 0: not known yet."""
    order: int = 0
    """A digest of the order where it is not known from seed and epoch; 0: none."""
    cuts: tuple[CutAt, ...] = ()
    """How the order was cut where that changes it: again whenever the epoch went on with other batches."""
    stream: dict[str, Any] | None = None
    """How a stream was read. See `stream.StreamReading`."""
    is_complete: bool = False
    """Whether all its batches were handed out."""
    iteration: int = 0
    """Which one it is, where shares change. See `ShareChanges.begin`."""
    shares: tuple[Any, ...] = ()
    """By what the rest of a state that was loaded is to be divided. See `ShareChanges.state`."""
    moved: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Positions that ranks were lost with, before they were used: they follow what was used until then."""


@dataclass
class LoaderPosition:
    """Where one loader stands."""

    next_epoch: int = 0
    """The epoch of the next iteration."""
    current: LoopPlace | None = None
    """That of the iteration that began or handed out a batch last; None: the next one begins an epoch."""
    resume: LoopPlace | None = None
    """That of a state that was loaded, until its epoch begins."""
    _open: list[LoopPlace] = field(default_factory=list)
    """Those of loops that go on."""

    def begin(self) -> LoopPlace:
        """Begin the next epoch; return its place."""
        self.current = self.upcoming()
        self.resume = None
        self.next_epoch = max(self.next_epoch, self.current.epoch + 1)
        return self.current

    def handed_out(self, place: LoopPlace, used: int) -> None:
        """Note a batch of the iteration at `place`, which goes `used` further in the job's order."""
        place.batches += 1
        place.used += used
        self.current = place
        if not any(place is each for each in self._open):
            self._open.append(place)

    @property
    def open_loops(self) -> int:
        """How many loops go on."""
        return len(self._open)

    def ended(self, place: LoopPlace | None, *, is_complete: bool) -> None:
        """Note that an iteration ends: after its last batch, or because its loop was left."""
        self._open = [each for each in self._open if each is not place]
        if place is not None and is_complete:
            place.is_complete = True
            if self._open and self.current is place:  # a loop within another one over the same loader
                self.current = self._open[-1]

    def upcoming(self) -> LoopPlace:
        """Return where the next iteration begins."""
        if self.resume is not None:
            return replace(self.resume)
        return LoopPlace(self.next_epoch)

    def choose_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one; what was loaded for it stays."""
        if self.resume is not None and self.resume.epoch == epoch:
            return
        self.resume = self.current = None
        self.next_epoch = epoch

    def state(self, asked_epoch: int | None, seed: int, shares: Callable[[int, int], list[Any]]) -> dict[str, Any]:
        """Return what `read_state` takes."""
        place = self.resume or self.current
        if asked_epoch is not None:
            place = (
                self.resume
                if self.resume is not None and self.resume.epoch == asked_epoch
                else LoopPlace(asked_epoch)
            )
        elif place is None or place.is_complete:
            place = LoopPlace(self.next_epoch)
        found = list(place.shares) or shares(place.iteration, place.used)
        return {
            **({"shares": found} if found else {}),
            **({"moved": [[used, list(lost)] for used, lost in place.moved]} if place.moved else {}),
            "version": _VERSION,
            "epoch": place.epoch,
            "batches": place.batches,
            "used": place.used,
            "seed": seed,
            "next_epoch": max(self.next_epoch, place.epoch + 1) if place.used else place.epoch + 1,
            "samples": place.samples,
            "order": place.order,
            "cuts": [list(cut) for cut in place.cuts],
            "stream": None if place.stream is None else stream_state(place.stream),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue at a state that was read."""
        self.current = None
        self.next_epoch = state["next_epoch"] if state["used"] else state["epoch"]
        self.resume = LoopPlace(
            state["epoch"], state["batches"], state["used"], state["samples"], state["order"],
            tuple(CutAt(*cut) for cut in state["cuts"]), copy.deepcopy(state["stream"]),
            shares=tuple(state.get("shares", ())),
            moved=tuple((used, tuple(lost)) for used, lost in state.get("moved", ())),
        )  # fmt: skip
        if not state["used"]:
            self.resume = LoopPlace(state["epoch"], shares=self.resume.shares)


def read_state(here: World, state: Any) -> dict[str, Any]:
    """Return a state that all ranks have; raise `ConfigError` for what is none."""
    is_state = (
        isinstance(state, Mapping)
        and {*state, "shares", "moved"} == {*_KEYS, "shares", "moved"}
        and all(_is_count(state[name]) for name in _NUMBERS if name != "seed")
        and isinstance(state["seed"], int)
        and state["version"] == _VERSION
        and isinstance(state["cuts"], (list, tuple))
        and all(
            isinstance(cut, (list, tuple)) and len(cut) == 4 and all(map(_is_count, cut)) for cut in state["cuts"]
        )
        and isinstance(state["stream"], (Mapping, type(None)))
        and ("shares" not in state or is_share_state(state["shares"]))
        and _are_moves(state.get("moved", []))
    )
    facts = dict(state) if is_state else f"no state: {str(state)[:80]}"
    require_same(
        here, "loading the state of a loader", [("the state", facts)], remedy="load the same file on all ranks"
    )
    if not is_state:
        raise ConfigError(
            f"load_state_dict: expected what state_dict() of a loader returned, got {str(state)[:80]}",
            remedy="save loader.state_dict() beside the model",
        )
    return dict(state)


def _are_moves(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(
        isinstance(each, (list, tuple)) and len(each) == 2 and _is_count(each[0])
        and isinstance(each[1], (list, tuple)) and all(_is_count(at) and at < each[0] for at in each[1])
        for each in value
    )  # fmt: skip


def reordered(order: Sequence[T], moved: Sequence[tuple[int, Sequence[int]]]) -> list[T]:
    """Return an order whose positions that ranks were lost with follow what was used by then.

    >>> reordered("abcdef", [(4, [1])])
    ['a', 'c', 'd', 'b', 'e', 'f']
    """
    found = list(order)
    for used, lost in moved:
        gone = set(lost)
        kept = [each for position, each in enumerate(found[:used]) if position not in gone]
        found[:used] = kept + [found[position] for position in lost]
    return found


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
