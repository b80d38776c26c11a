"""Training that goes on when ranks die and hosts come: `State` to go back to, `run_fn` to go on with.

[Note: what is different from Horovod] The names, the order of calls and the exceptions are Horovod's. Beyond
them: a commit replaces the one before as a whole or not at all; rank 0 of a new generation has the newest commit
of all who are left (see [Note: progress]); all ranks agree whether the state is copied, so that survivors that
need no copy cannot wait for others that do; what is copied is the state as it is, not the last commit of its
attributes; and a fault of the program that looks like a lost peer is raised when it comes a second time, not
retried for ever.
"""

from __future__ import annotations

import copy
import functools
import queue
import re
from collections.abc import Callable, Sequence
from enum import IntFlag
from typing import TYPE_CHECKING, Any, Protocol

from ...core.vocabulary.errors import CommError
from .exceptions import HorovodInternalError, HorovodMismatchError, HostsUpdatedInterrupt, from_comm_error

if TYPE_CHECKING:
    from ...train.elastic import ElasticWorker, SyncAgreement

__all__ = [
    "HostUpdateResult",
    "ObjectState",
    "State",
    "WorkerNotificationManager",
    "notification_manager",
    "run_fn",
]

RESETS_WITHOUT_A_GENERATION = 5
"""How often in a row ranks may fail to meet before it is no accident."""


class HostUpdateResult(IntFlag):
    """What has changed in the list of hosts."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class State:
    """What all ranks have alike, and can go back to. Subclasses say how it is saved, restored and copied."""

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], None]] = []
        self._commits = 0

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Call `callbacks` whenever the number of ranks may have changed: to set the learning rate."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """A new generation of ranks has met."""
        # Messages about changes that are part of this generation already.
        self._last_updated_timestamp = max(self._last_updated_timestamp, notification_manager.assigned_at)
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Hosts came or must go (called in another thread); the next `check_host_updates` acts on it."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state, then `check_host_updates`. To be called by all ranks at the same point."""
        self.save()
        self._commits += 1
        notification_manager.committed()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise `HostsUpdatedInterrupt`, on all ranks alike, when rank 0 has heard of other hosts."""
        before = latest = self._last_updated_timestamp
        update = HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, kind = self._host_messages.get()
            if timestamp > latest:
                latest = timestamp
                update |= HostUpdateResult(kind)
        told = self._bcast_object((before, latest, int(update)))
        before, self._last_updated_timestamp, all_update = told
        if self._last_updated_timestamp > before:
            raise HostsUpdatedInterrupt(all_update == HostUpdateResult.removed)

    def save(self) -> None:
        """Keep the state as it is now, in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what was kept last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take the state of rank 0, and keep it. To be called by all ranks."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to a new generation of ranks, before the state is copied."""


class ObjectState(State):
    """Plain attributes as state: numbers, strings, lists; whatever can be pickled."""

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        self._saved_state = kwargs
        for name, value in kwargs.items():
            setattr(self, name, value)
        super().__init__(bcast_object=bcast_object, get_rank=get_rank)
        self.save()

    def save(self) -> None:
        """Keep copies: what is changed in place later does not change what was kept."""
        self._saved_state = self._captured()

    def restore(self) -> None:
        """Set the attributes as they were kept."""
        for name, value in copy.deepcopy(self._saved_state).items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Take the attributes of rank 0, and keep them."""
        received = self._received()
        if received:
            self._saved_state = received
            self.restore()

    def _captured(self) -> dict[str, Any]:
        return copy.deepcopy({name: getattr(self, name) for name in self._saved_state})

    def _received(self) -> dict[str, Any]:
        if not self._saved_state:
            return {}
        found: dict[str, Any] = self._bcast_object(self._captured())
        return found


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """Return `func(state, ...)` as a function that is begun again, after `reset`, whenever the ranks have changed.

    After a failed operation the state is restored first; then it is copied from rank 0.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        notification_manager.init()
        notification_manager.register_listener(state)
        skip_sync = False
        patience = _Patience()
        try:
            while True:
                try:
                    _share(state, skip_sync)
                    return func(state, *args, **kwargs)
                except (HorovodInternalError, CommError) as error:
                    failure = from_comm_error(error) if isinstance(error, CommError) else error
                    patience.refuse_repetition(failure, state._commits)
                    notification_manager.failed(failure)
                    state.restore()
                    skip_sync = False
                except HostsUpdatedInterrupt as interrupt:
                    skip_sync = interrupt.skip_sync
                _meet(reset)
                state.on_reset()
        finally:
            notification_manager.remove_listener(state)

    return wrapper


def _share(state: State, skip_sync: bool) -> None:
    agreed = notification_manager.agree_on_sync(needed=not skip_sync)
    if agreed is None:
        if not skip_sync:
            state.sync()
    elif agreed.needed:
        state.sync()
        notification_manager.has_state(agreed.progress)


def _meet(reset: Callable[[], None]) -> None:
    """Reset until a generation is complete: a rank may die while the others meet."""
    for attempt in range(RESETS_WITHOUT_A_GENERATION):
        try:
            reset()
            return
        except (HorovodInternalError, CommError) as problem:
            if not notification_manager.is_connected or attempt == RESETS_WITHOUT_A_GENERATION - 1:
                raise
            notification_manager.failed(problem)


class _Patience:
    """Notices a fault of the program: the same mismatch twice, and nothing committed in between."""

    def __init__(self) -> None:
        self._last: tuple[str, int] | None = None

    def refuse_repetition(self, error: HorovodInternalError, commits: int) -> None:
        if not isinstance(error, HorovodMismatchError):
            self._last = None
            return
        text = re.sub(r"^rank \d+, ", "", str(error))
        if self._last == (text, commits):
            raise HorovodMismatchError(
                f"{error}; the same error came again after the last commit was restored, so no rank was lost: "
                "the program asks for different things on different ranks"
            ) from error
        self._last = (text, commits)


# What a state hears from the launcher of an elastic job, and what the launcher hears of it.
#
# Outside elastic jobs everything here does nothing, so that the same program runs with and without.


class HostsListener(Protocol):
    """Who wants to know of hosts that come and go: an elastic state."""

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Hosts came or must go; called in another thread."""
        ...


class WorkerNotificationManager:
    """Passes news of hosts on to the states that listen. One a process."""

    def __init__(self) -> None:
        self._member: ElasticWorker | None = None
        self._listeners: set[HostsListener] = set()

    @property
    def is_connected(self) -> bool:
        """Whether a launcher of an elastic job is there."""
        return self._member is not None

    @property
    def assigned_at(self) -> float:
        """When this generation was formed, by the launcher's clock; 0 outside elastic jobs."""
        return 0.0 if self._member is None else max(0.0, self._member.assigned_at)

    def init(self) -> None:
        """Connect to the launcher of an elastic job, when there is one. May be called again."""
        if self._member is None:
            from ...train.elastic import member

            self._member = member()
            if self._member is not None:
                self._member.add_listener(self.handle_hosts_updated)

    def register_listener(self, listener: HostsListener) -> None:
        """Tell `listener` of hosts that come and go."""
        self._listeners.add(listener)

    def remove_listener(self, listener: HostsListener) -> None:
        """Tell it no longer."""
        self._listeners.discard(listener)

    def handle_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Hosts have changed."""
        for listener in list(self._listeners):
            listener.on_hosts_updated(timestamp, update_res)

    def agree_on_sync(self, *, needed: bool) -> SyncAgreement | None:
        """Learn whether any rank needs rank 0's state; None outside elastic jobs."""
        return None if self._member is None else self._member.agree_on_sync(needed=needed)

    def has_state(self, progress: int) -> None:
        """This rank has the state after `progress` commits."""
        if self._member is not None:
            self._member.has_state(progress)

    def committed(self) -> None:
        """All ranks have committed once more."""
        if self._member is not None:
            self._member.committed()

    def failed(self, why: BaseException) -> None:
        """An operation failed here; the other ranks must leave too."""
        if self._member is not None:
            self._member.report_failure(str(why))


notification_manager = WorkerNotificationManager()
"""The one of this process."""
