"""The world: who I am among the ranks, and the groups to talk to the others.

`connect` is the plain constructor; users call `fd.init`, which adds the session's recorder and
its handling of crashes. One world at a time; after `close` the next one can be made, any number
of times in a process.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...core.environ.env import read_nonce
from ...core.launchers.rank_variables import RankVariables, read_rank_variables
from ...core.vocabulary.errors import CommError, ConfigError
from ...core.vocabulary.events import NullRecorder, Recorder, StepDone
from ..batch_weight.weight import BatchWeight
from . import forks
from .comm_errors import translate_error, translated
from .rendezvous import (
    first_line,
    forget_generation,
    forget_meetings,
    forget_world_before,
    fresh_prefix,
    open_store,
)
from .socket_abort import SocketAborter, noticed_sockets

DEFAULT_TIMEOUT_SECONDS = 600.0
BUILD_SECONDS = 5.0
"""In an elastic job, for ranks that have met to connect: one that dies meanwhile is not waited for longer."""


@dataclass(eq=False)
class World:
    """The ranks of one job, seen from one of them. The groups of a world of one rank are None."""

    rank: int
    size: int
    local_rank: int
    """Rank among those of this host."""
    local_size: int
    node_rank: int
    node_count: int
    host: str
    address: str | None
    """The meeting point; None in a world of one."""
    device: torch.device
    """Where this rank's model belongs."""
    source: str
    """Whose rank variables were read; "alone" when nobody's."""
    timeout_seconds: float
    group: dist.ProcessGroup | None = None
    """All ranks; None in a world of one."""
    store: dist.Store | None = None
    recorder: Recorder = field(default_factory=NullRecorder)
    share: BatchWeight = field(default_factory=BatchWeight)
    """How much of the current global batch is this rank's; set by `fd.shard`'s loader."""
    steps_done: int = 0
    """Steps of the leading optimizer since `fd.init`."""
    counts_steps: bool = False
    """True once an optimizer leads: the first one given to `fd.distribute`."""
    device_marks: Any = None
    """When the accelerator passed what, for the records; made and read by `parallel.device_marks`."""
    sockets: SocketAborter = field(default_factory=SocketAborter)
    closed: bool = False
    in_forked_child: bool = False
    """In a forked child of a rank: what the parent's world was."""
    _topics: dict[str, int] = field(default_factory=dict)
    _subgroups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    _owns_default_group: bool = False
    _hooks: tuple[Callable[..., Any], Callable[..., Any]] | None = None
    """What printed uncaught errors before the group was made, and the wrapper that torch put around it."""
    _dropped: deque[Callable[[], None]] = field(default_factory=deque)
    _step_listeners: list[Callable[[int], None]] = field(default_factory=list)
    _closers: list[weakref.WeakMethod[Callable[[], None]]] = field(default_factory=list)
    _forgetters: list[weakref.WeakMethod[Callable[[], None]]] = field(default_factory=list)

    @property
    def node(self) -> dist.ProcessGroup | None:
        """The ranks of my host (None in a world of one). The first use must happen on all ranks."""
        return self._subgroup("node", [self.rank - self.local_rank + i for i in range(self.local_size)])

    @property
    def cross(self) -> dist.ProcessGroup | None:
        """My peers, the ranks of my local rank on every host. The first use must happen on all ranks."""
        return self._subgroup("cross", list(range(self.local_rank, self.size, self.local_size)))

    def new_group(self, *, timeout_seconds: float | None = None) -> dist.ProcessGroup | None:
        """Make another group of all ranks, with its own connections, so that traffic cannot interleave.

        To be called by all ranks in the same order.
        """
        if self.size == 1:
            return None
        self.let_go()
        wait = timedelta(seconds=timeout_seconds or self.timeout_seconds)
        with self.sockets.noticed(), translated(self, "making a group"):
            made: dist.ProcessGroup = dist.new_group(list(range(self.size)), timeout=_build_time(wait))
        return _patient(made, wait)

    def drop_group(self, group: dist.ProcessGroup) -> None:
        """Close the connections of a group that `new_group` made; the other ranks do so in their own time."""
        with suppress(ValueError):  # it is gone already: all of them go with the default group
            dist.destroy_process_group(group)

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

    def topic(self, name: str) -> str:
        """Return a key prefix that is fresh on every use and the same on all ranks."""
        count = self._topics.get(name, 0)
        self._topics[name] = count + 1
        return f"{name}/{count}"

    def finish_step(self) -> None:
        """Count and record a step of the leading optimizer, and tell who wants to know."""
        self.steps_done += 1
        self.recorder.record(StepDone(self.steps_done, time.monotonic()))
        for listener in self._step_listeners:
            listener(self.steps_done)
        if self._dropped:
            self.let_go()

    def after_step(self, listener: Callable[[int], None]) -> None:
        """Call `listener` with the number of every step that is done, after it was recorded."""
        self._step_listeners.append(listener)

    def call_on_close(self, closer: Callable[[], None]) -> None:
        """Call the bound method `closer` when the world closes, if its object still lives.

        Whoever keeps a group must drop it then: a group that outlives the world keeps threads that abort
        the process when they are met at its exit.
        """
        self._closers = [each for each in self._closers if each() is not None]
        self._closers.append(weakref.WeakMethod(closer))

    def call_in_forked_child(self, forget: Callable[[], None]) -> None:
        """Call the bound method `forget` in a forked child, if its object still lives.

        It must let go without a word to the other ranks, and without waiting for any thread or lock.
        See [Note: a forked child is no rank].
        """
        self._forgetters = [each for each in self._forgetters if each() is not None]
        self._forgetters.append(weakref.WeakMethod(forget))

    def enter_forked_child(self) -> None:
        """In a forked child: tell who the parent is, and nothing else any more."""
        if self.closed:
            return
        self.closed = self.in_forked_child = True
        made = (self.store, self.group, *self._subgroups.values())
        forks.keep_for_ever(each for each in made if each is not None)
        self.sockets = SocketAborter()
        self.recorder = NullRecorder()
        self.share = BatchWeight(self.share.factor)
        self._owns_default_group = False
        self._closers.clear()
        self._dropped.clear()
        for forgetter in self._forgetters:
            call = forgetter()
            if call is not None:
                call()
        self._let_go_of_what_was_made()

    def close(self) -> None:
        """Leave: close the groups this world opened. May be called twice."""
        if self.closed:
            return
        self.closed = True
        self.let_go()
        for closer in self._closers:
            call = closer()
            if call is not None:
                call()
        if self._owns_default_group and dist.is_initialized():
            dist.destroy_process_group()
        self._let_go_of_what_was_made()
        if _held.world is self:
            _held.world = None
            _held.sockets = None
            forget_generation()

    def _let_go_of_what_was_made(self) -> None:
        if self._hooks is not None and sys.excepthook is self._hooks[1]:
            # torch leaves its wrapper, one more around the others each time.
            sys.excepthook = self._hooks[0]
        self._hooks = None
        self.group = self.store = None
        self._subgroups.clear()
        self._step_listeners.clear()
        self.device_marks = None

    def _subgroup(self, name: str, mine: list[int]) -> dist.ProcessGroup | None:
        if self.size == 1:
            return None
        if name not in self._subgroups:
            if self.size % self.local_size:
                raise ConfigError(f"{self.size} ranks on hosts of {self.local_size}: node groups need equal hosts")
            with self.sockets.noticed(), translated(self, f"making the {name} group"):
                made, _ = dist.new_subgroups_by_enumeration(self._enumerate(name))
            assert made is not None, f"rank {self.rank} is in no {name} group {mine}"
            self._subgroups[name] = made
        return self._subgroups[name]

    def _enumerate(self, name: str) -> list[list[int]]:
        hosts = [list(range(i, i + self.local_size)) for i in range(0, self.size, self.local_size)]
        return hosts if name == "node" else [list(peers) for peers in zip(*hosts, strict=True)]


@dataclass
class _Held:
    """The world of this process."""

    world: World | None = None
    sockets: SocketAborter | None = None
    """Those of the world, also while it is being made."""
    parents: World | None = None
    """In a forked child: the world of the process it was forked from."""
    has_parents_group: bool = False
    """In a forked child: whether torch's default group is there, and the parent's."""


_held = _Held()


def world() -> World:
    """Return the current world; raise `ConfigError` if `init` was not called.

    In a forked child of a rank it is the parent's: rank, size and host can be read, and nothing else.
    """
    if _held.world is None:
        if _held.parents is not None:
            return _held.parents
        raise ConfigError("there is no world yet", remedy="call farandole.init() first")
    return _held.world


def has_world() -> bool:
    """Return whether `connect` has made a world that is still open, in this process."""
    return _held.world is not None


def escape() -> None:
    """End whatever this process waits for in its world, from another thread. See [Note: how to leave]."""
    sockets = _held.sockets
    if sockets is not None:
        sockets.shut()


@functools.cache
def watch_forks() -> None:
    """See [Note: a forked child is no rank]; what is of a higher layer is to be registered after this."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    """See [Note: a forked child is no rank]."""
    here, _held.world, _held.sockets = _held.world, None, None
    forks.separate_memory()
    forks.keep_for_ever(forks.inherited_groups())
    forget_meetings()
    forks.replace_sockets(noticed_sockets())
    _held.has_parents_group = dist.is_available() and dist.is_initialized()
    if here is not None:
        _held.parents = here
        here.enter_forked_child()


def connect(
    *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS, device: str | torch.device | None = None
) -> World:
    """Make this process's world from the rank variables; a world of one when there are none.

    Raises `ConfigError` for variables that make no sense, `Mismatch` when ranks disagree on the
    world's size, `Stalled` (naming who is missing) when ranks do not arrive within `timeout_seconds`.
    """
    if _held.world is not None:
        return _held.world
    if not 0 < timeout_seconds < float("inf"):
        raise ConfigError(f"timeout_seconds={timeout_seconds}: expected a positive number of seconds")
    watch_forks()
    if _held.has_parents_group and _held.parents is not None and dist.is_initialized():
        forks.refuse_inherited_group(_held.parents.rank, _held.parents.size)
    place = read_rank_variables()
    if place is None and dist.is_available() and dist.is_initialized():
        place = _place_of_existing_group()
    if place is None or place.size == 1:
        made = World(0, 1, 0, 1, 0, 1, socket.gethostname(), None, _device(device, 0), "alone", timeout_seconds)
    else:
        made = _connect_many(place, timeout_seconds, device)
    _held.world, _held.parents = made, None
    return made


def _connect_many(place: RankVariables, timeout_seconds: float, device: str | torch.device | None) -> World:
    made = World(
        rank=place.rank,
        size=place.size,
        local_rank=place.local_rank,
        local_size=place.local_size,
        node_rank=place.node_rank,
        node_count=place.node_count,
        host=socket.gethostname(),
        address=place.address,
        device=_device(device, place.local_rank),
        source=place.source,
        timeout_seconds=timeout_seconds,
    )
    _held.sockets = made.sockets
    try:
        with made.sockets.noticed():
            _connect_groups(made, place, timedelta(seconds=timeout_seconds))
    except BaseException:
        made.close()
        _held.sockets = None
        forget_generation()
        raise
    return made


def _connect_groups(made: World, place: RankVariables, wait: timedelta) -> None:
    from .store_sync import handshake

    if dist.is_initialized():
        made.store = fresh_prefix(("", 0), dist.distributed_c10d._get_default_store())
        made.group = dist.group.WORLD
        handshake(made)
        return
    made.store = open_store(place, wait, made.sockets)
    handshake(made)
    with translated(made, "meeting the other ranks"):
        forget_world_before(place)
    backend = "cpu:gloo,cuda:nccl" if made.device.type == "cuda" else "gloo"
    options: dict[str, Any] = {"device_id": made.device} if made.device.type == "cuda" else {}
    made._owns_default_group = True
    hook = sys.excepthook
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("torch", made.store),
            rank=made.rank,
            world_size=made.size,
            timeout=_build_time(wait),
            **options,
        )
    except BaseException as problem:
        # torch names groups by counting them, those too that were not made; ranks that count otherwise never meet.
        dist.distributed_c10d._world.group_count = 0
        if not isinstance(problem, RuntimeError):
            raise
        if made.sockets.shut_down:
            raise translate_error(problem, made, "connecting") from None
        raise CommError(
            f"the ranks found each other but could not connect: {first_line(problem)}",
            rank=made.rank,
            operation="connecting",
            remedy="on several hosts, name the interface with GLOO_SOCKET_IFNAME",
        ) from None
    made._hooks = hook, sys.excepthook
    made.group = dist.group.WORLD
    assert made.group is not None, "the group was just made"
    _patient(made.group, wait)


def _build_time(wait: timedelta) -> timedelta:
    return min(wait, timedelta(seconds=BUILD_SECONDS)) if read_nonce() else wait


def _patient(group: dist.ProcessGroup, wait: timedelta) -> dist.ProcessGroup:
    """Give operations of a group their own time: it was built with less in an elastic job."""
    if _build_time(wait) != wait:
        dist.distributed_c10d._set_pg_timeout(wait, group)
    return group


def _place_of_existing_group() -> RankVariables:
    rank, size = dist.get_rank(), dist.get_world_size()
    return RankVariables("torch.distributed", rank, size, rank, size, 0, 1, None, None)


def _device(wanted: str | torch.device | None, local_rank: int) -> torch.device:
    if wanted is not None:
        device = torch.device(wanted)
        if str(wanted) == "cuda":
            device = torch.device("cuda", local_rank)
    elif torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
    else:
        return torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
