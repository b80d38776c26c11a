"""What lives from one `fd.init` to its `fd.shutdown`, beside the ranks themselves.

Other packages keep their own state of a world here too (`Session.keep`), by its class, rather than in a table of
their own module: then it ends with the world.

[Note: the leading optimizer] Several models may train at once, and a step is counted once: by the first optimizer
that was registered and still lives. When it is dropped, the next one leads, and the count goes on.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from ...core.vocabulary.degrees import Degrees
from ...core.vocabulary.events import NullRecorder, Recorder, StepDone
from ..batch_weight import BatchWeight, Listeners

# Steps of a training: which optimizer counts them, and who is told of which.
Listener = Callable[[int], int | None]
"""Takes the number of a step that is done; returns that of the next one to be told of. None: of the next."""
NEVER = sys.maxsize
"""What a listener returns that has seen enough."""


def next_power_of_two(step: int) -> int:
    """Return the smallest power of two above `step`: for a listener that looks ever more rarely."""
    return 1 << step.bit_length()


@dataclass(eq=False)
class _Subscription:
    listener: Listener
    next_step: int = 0
    """It is told of the first step that is done and not before this one."""


class StepCounter:
    """The steps since `fd.init`. Optimizers are known weakly."""

    def __init__(self) -> None:
        self.done = 0
        self.has_begun = False
        """Whether an optimizer was ever registered: a model was distributed, or is recorded."""
        self._optimizers: list[weakref.ref[object]] = []
        """In the order of registration: the first that lives leads."""
        self._subscriptions: list[_Subscription] = []
        self.on_begin: Callable[[], None] | None = None
        """Called where a step begins: when an optimizer is registered, and at the end of each step."""

    def register(self, optimizer: object) -> None:
        """Let `optimizer` lead once those registered before it are gone. See [Note: the leading optimizer]."""
        self.has_begun = True
        self._optimizers = [each for each in self._optimizers if each() is not None]
        if not any(each() is optimizer for each in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))
        if self.on_begin is not None:
            self.on_begin()

    def unregister(self, optimizer: object) -> None:
        """Let `optimizer` lead no more: its training is over, and something may still hold it."""
        self._optimizers = [each for each in self._optimizers if each() not in (None, optimizer)]

    def optimizers(self) -> list[object]:
        """Return those that are registered and live, in their order."""
        found = (each() for each in self._optimizers)
        return [each for each in found if each is not None]

    def leads(self, optimizer: object) -> bool:
        """Return whether the steps of `optimizer` are those that count."""
        return optimizer is next((found for each in self._optimizers if (found := each()) is not None), None)

    def count(self, optimizer: object) -> bool:
        """Count a step of `optimizer` if it leads; return whether it does."""
        is_leader = self.leads(optimizer)
        self.done += is_leader
        return is_leader

    def after_step(self, listener: Listener) -> None:
        """Call `listener` with the number of the next step that is done, after it was recorded. See `Listener`."""
        self._subscriptions.append(_Subscription(listener))

    def ask_again(self, listener: Listener) -> None:
        """Call `listener` after the next step, whatever it has asked for."""
        for each in self._subscriptions:
            each.next_step = 0 if each.listener == listener else each.next_step

    def notify(self) -> None:
        """Call the listeners that wait for this step."""
        done = self.done
        for each in self._subscriptions:
            if each.next_step <= done:
                each.next_step = each.listener(done) or done + 1
        self._subscriptions = [each for each in self._subscriptions if each.next_step != NEVER]
        if self.on_begin is not None:
            self.on_begin()

    def forget(self) -> None:
        """Call no listener any more."""
        self._subscriptions.clear()
        self.on_begin = None


# Ranks that change while a training goes on: some are lost, and the others go on beneath what holds their world.


@dataclass(frozen=True)
class RankChange:
    """What has changed, as one rank sees it."""

    size: int
    """Ranks before."""
    left: tuple[int, ...]
    """Numbers before of the ranks that are still there, in the order of now."""
    loops: list[Any]
    """Where the loaders of those stand that are furthest. See `DividedLoops.under_way`."""


class Agreed:
    """Something kept by a session that is of the ranks of now alone: it is dropped when they change."""


class Regroup(Protocol):
    """The way of a job's ranks from one generation to the next."""

    @property
    def worker(self) -> int:
        """The launcher's number of this process, which it keeps."""

    @property
    def is_asked(self) -> bool:
        """Whether other ranks are to be the next generation: some that wait come in, or some are to leave."""

    def has_state(self) -> None:
        """This rank trains: no generation goes on without those that do."""

    def leave(self, why: str) -> None:
        """Free all ranks from what they wait for: this generation is over."""

    def enter(self, *, lets_in: bool = False) -> None:
        """Wait for the ranks that are left, and let the world be these.

        `lets_in`: those that wait are let in, too, if all ranks that are left say so.
        """


class DividedLoops:
    """The loaders that are divided over the ranks, where ranks may be lost. One a session."""

    def note_exchange(self) -> None:
        """What was drawn so far is in gradients that all ranks have."""
        raise NotImplementedError

    def under_way(self) -> list[Any]:
        """Return where they stand, as JSON: equal on ranks that are in one step."""
        raise NotImplementedError

    def standing(self) -> list[Any]:
        """Return of each its number, and where it would go on, as JSON: equal on ranks between two steps."""
        raise NotImplementedError

    def why_whole(self) -> str:
        """Return why what is to come cannot be divided anew now; empty: it can."""
        raise NotImplementedError


_Kept = TypeVar("_Kept")


@dataclass(eq=False)
class Session:
    """The state of one world that is no description of its ranks."""

    recorder: Recorder = field(default_factory=NullRecorder)
    batch_weight: BatchWeight = field(default_factory=BatchWeight)
    """Weight of this rank's batch in the global one; set by `fd.shard`'s loader."""
    steps: StepCounter = field(default_factory=StepCounter)
    degrees: Degrees | None = None
    """The mesh of the ranks; None: every rank is data parallel."""
    holds_passes: bool = False
    """Whether the backward passes that begin now stay on this rank: inside `fd.accumulate`."""
    stall_seconds: float = 0.0
    """The plan's: how long no step is done before it is said who waits for whom; 0: never."""
    is_tuned: bool = False
    """Whether the exchange of gradients may change while the job runs, so that it is made ready for that."""
    asks_all_ranks: bool = False
    """Whether the loop asks all ranks in its steps, as `fd.preempted` does."""
    regroup: Regroup | None = None
    """How ranks that are left go on; None: the job ends when one is lost."""
    _followers: Listeners = field(default_factory=Listeners)
    _kept: dict[type, Any] = field(default_factory=dict)
    _dropped: deque[Callable[[], None]] = field(default_factory=deque)
    _closers: Listeners = field(default_factory=Listeners)
    _forgetters: Listeners = field(default_factory=Listeners)
    _parts: list[Session] = field(default_factory=list)

    def make_part(self) -> Session:
        """Return the session of some of the ranks: of the same records and steps, and with state of its own."""
        part = Session(
            recorder=self.recorder, batch_weight=self.batch_weight, steps=self.steps, degrees=self.degrees,
            stall_seconds=self.stall_seconds, is_tuned=self.is_tuned,
        )  # fmt: skip
        self._parts.append(part)
        return part

    def hold_passes(self, hold: bool) -> None:
        """Say whether the backward passes that begin now stay on this rank."""
        self.holds_passes = hold
        for part in self._parts:
            part.hold_passes(hold)

    def keep(self, kind: type[_Kept], make: Callable[[], _Kept]) -> _Kept:
        """Return the session's only `kind`, made by `make` at the first call."""
        kept: _Kept | None = self._kept.get(kind)
        if kept is None:
            kept = self._kept[kind] = make()
        return kept

    def kept(self, kind: type[_Kept]) -> _Kept | None:
        """Return the session's `kind`; None if none is kept."""
        kept: _Kept | None = self._kept.get(kind)
        return kept

    def drop(self, kind: type[_Kept]) -> _Kept | None:
        """Return the session's `kind`, and keep it no longer; None if none was kept."""
        kept: _Kept | None = self._kept.pop(kind, None)
        return kept

    def step_ends(self, optimizer: object, at_seconds: float | None = None) -> None:
        """Count and record a step, and tell those that asked for it, if `optimizer` is the leading one.

        `at_seconds`: when it ended; None: now.
        """
        if self.steps.count(optimizer):
            end = time.monotonic() if at_seconds is None else at_seconds
            self.recorder.record(StepDone(self.steps.done, end))
            self.steps.notify()
            self.let_go()

    def let_go_later(self, release: Callable[[], None]) -> None:
        """Have `release` called soon, by the thread that trains.

        For finalizers (`weakref.finalize`) of what holds threads, groups or connections: they may run in any
        thread, in the middle of anything, and must not wait.
        """
        self._dropped.append(release)

    def let_go(self) -> None:
        """Release what was dropped since the last call; called at the ends of steps and before groups are made."""
        while self._dropped:
            self._dropped.popleft()()
        for part in self._parts:
            part.let_go()

    def call_on_close(self, closer: Callable[[], None], *, first: bool = False) -> None:
        """Call the bound method `closer` when the world closes, if its object still lives.

        `first`: while the connections of others are still open.

        An object that keeps a group must drop it then: a group that outlives the world keeps threads that abort
        the process when they are met at its exit.
        """
        self._closers.add(closer, first=first)

    def follow_change(self, follower: Callable[[RankChange], None]) -> None:
        """Call the bound method `follower` when the ranks have changed: on all of them, in the order of calls.

        The groups and the store of the world are the new ones then.
        """
        self._followers.add(follower)

    def ranks_change(self, change: RankChange) -> None:
        """Tell those that follow."""
        self._kept = {kind: kept for kind, kept in self._kept.items() if not isinstance(kept, Agreed)}
        self._followers(change)

    def call_in_forked_child(self, forget: Callable[[], None]) -> None:
        """Call the bound method `forget` in a forked child, if its object still lives.

        It must let go without a word to the other ranks, and without waiting for any thread or lock.
        See [Note: a forked child is no rank].
        """
        self._forgetters.add(forget)

    def enter_forked_child(self) -> None:
        """In a forked child: record nothing, and have all that is registered forget its connections."""
        self.recorder = NullRecorder()
        self.batch_weight = BatchWeight(self.batch_weight.factor)
        self._closers.clear()
        self._dropped.clear()
        self._forgetters()
        for part in self._parts:
            part.enter_forked_child()
        self.steps.forget()

    def close(self) -> None:
        """Release what was dropped, and close all that is registered."""
        for part in self._parts:
            part.close()
        self._parts.clear()
        self.let_go()
        self._closers()
        self.steps.forget()
        self._kept.clear()
