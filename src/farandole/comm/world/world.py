"""The world: which ranks there are, which of them this process is, and the groups to reach the others.

`connect.connect` makes it; users call `fd.init`, which adds recording and the handling of crashes. One world at a
time; after `close` the next one can be made, any number of times in a process.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from ...core.env import read_nonce
from ...core.host.stacks import report_uncaught_errors
from ...core.vocabulary.degrees import Degrees, MeshPlace
from ...core.vocabulary.errors import ConfigError, PlanError
from . import forks
from .comm_errors import Member, SocketAborter, refuse_if_ended, translated
from .forks import tell_children
from .rendezvous import forget_generation
from .session import Agreed, Session

# What connects this rank with the others: torch's process groups, the store, and the sockets of both.


_naming = threading.Lock()
BUILD_SECONDS = 5.0
"""In an elastic job, for ranks that have met to connect: one that dies meanwhile is not waited for longer."""


@dataclass(eq=False)
class ProcessGroups:
    """The connections of one world; empty in a world of one."""

    default: dist.ProcessGroup | None = None
    """All ranks."""
    ranks: tuple[int, ...] | None = None
    """Their numbers in the job, in a world of some of its ranks (`part`); None: they are all there are."""
    hosts: tuple[str, ...] = ()
    """By number in the job; empty before they have met."""
    name: str = ""
    """Of the part of the ranks, fresh in the job."""
    store: dist.Store | None = None
    sockets: SocketAborter = field(default_factory=SocketAborter)
    subgroups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    """By name, made at their first use."""
    owns_default: bool = False
    """Whether torch's default group was made here, and not found."""
    exception_hooks: tuple[Callable[..., Any], Callable[..., Any]] | None = None
    """What printed uncaught errors before the group was made, and the wrapper that torch put around it."""
    _topics: dict[str, int] = field(default_factory=dict)

    def topic(self, name: str) -> str:
        """Return a key prefix of the store that is fresh on every use and the same on all ranks."""
        count = self._topics.get(name, 0)
        self._topics[name] = count + 1
        return f"{self.name}{name}/{count}"

    @property
    def topics_used(self) -> int:
        """How often `topic` was called."""
        return sum(self._topics.values())

    def close(self) -> None:
        """Close the groups that were opened here."""
        if self.owns_default and dist.is_initialized():
            dist.destroy_process_group()
        self._clear()

    def abandon(self) -> None:
        """In a forked child: use nothing any more, and destroy nothing."""
        made = (self.store, self.default, *self.subgroups.values())
        forks.keep_for_ever(each for each in made if each is not None)
        self.sockets = SocketAborter()
        self.owns_default = False
        self._clear()

    def _clear(self) -> None:
        if self.exception_hooks is not None and sys.excepthook is self.exception_hooks[1]:
            # torch leaves its wrapper, one more around the others each time.
            sys.excepthook = self.exception_hooks[0]
        self.exception_hooks = None
        self.default = self.store = None
        self.subgroups.clear()


def build_time(wait: timedelta) -> timedelta:
    """Return how long to wait while a group is built whose operations wait for `wait`."""
    return min(wait, timedelta(seconds=BUILD_SECONDS)) if read_nonce() else wait


def new_part_group(
    member: Member, ranks: list[int], name: str, wait: timedelta, backend: str | None
) -> dist.ProcessGroup:
    """Make a group of `ranks` of the job; called by these alone, with a `name` that is fresh and the same on them.

    torch names groups that only their members make after the number of groups that this rank has. Ranks of several
    parts have other numbers, so members would not find each other; and after a group is dropped, the next one gets
    the name of one that lives.
    """
    module = dist.distributed_c10d
    with _naming, member.sockets.noticed(), translated(member, f"making {name}"):
        theirs = module._process_group_name
        module._process_group_name = lambda *_, **__: dist.GroupName(f"{name}/{'-'.join(map(str, ranks))}")
        try:
            made: dist.ProcessGroup = dist.new_group(
                ranks, timeout=build_time(wait), backend=backend, use_local_synchronization=True
            )
        finally:
            module._process_group_name = theirs
    return set_patience(made, wait)


def set_patience(group: dist.ProcessGroup, wait: timedelta) -> dist.ProcessGroup:
    """Give operations of a group their own time: it was built with less in an elastic job."""
    if build_time(wait) != wait:
        dist.distributed_c10d._set_pg_timeout(wait, group)
    return group


APART: Final = "apart"
DEFAULT_TIMEOUT_SECONDS = 600.0
_OWN_SECONDS = 2.0
"""For the others to come to a refusal of their own."""
_TELL_SECONDS = 10.0
"""For those that were freed to find this one."""


@dataclass
class _Refusals(Agreed):
    """What this rank knows of refusals of the job."""

    count: int = 0

    @property
    def key(self) -> str:
        """Where the next one will be."""
        return f"refusal/{self.count}"


@dataclass(eq=False)
class World(MeshPlace):
    """The ranks of one job, seen from one of them. Made by `fd.init`; read by everything else.

    `rank`, `size`, `is_main`, `local_rank`, `local_size`, `node_rank`, `node_count`, `host`, `device`, `backend`,
    and the groups `group`, `node` and `cross`.
    """

    rank: int
    size: int
    local_rank: int
    """Rank among those of this host."""
    local_size: int
    node_rank: int
    node_count: int
    host: str
    address: str | None
    """Where rank 0 serves the store; None in a world of one."""
    device: torch.device
    """Where this rank's model belongs."""
    source: str
    """The launcher whose variables were read; "alone" without one; `APART`."""
    timeout_seconds: float
    groups: ProcessGroups = field(default_factory=ProcessGroups)
    """What connects this rank with the others."""
    session: Session = field(default_factory=Session)
    """What lives as long as this world: recorder, step counter, weight of the batch, state of other packages."""
    closed: bool = False
    in_forked_child: bool = False
    """In a forked child of a rank: what the parent's world was."""

    def __repr__(self) -> str:
        """One line: who this rank is, and where."""
        state = ", closed" if self.closed else ""
        return (
            f"World(rank {self.rank} of {self.size}, local rank {self.local_rank} of {self.local_size}, "
            f"host {self.host}, {self.device}, {self.backend}{state})"
        )

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints, logs and saves."""
        return self.rank == 0

    @property
    def is_apart(self) -> bool:
        """Whether this rank is alone until it takes the state of those that train. Its number is beyond theirs."""
        return self.source == APART

    @property
    def degrees(self) -> Degrees:
        """The mesh that the ranks of the job form; data parallel without degrees in the plan."""
        found = self.session.degrees
        is_known = found is not None and found.size == self.size and self.groups.ranks is None
        return found if found is not None and is_known else Degrees(data=self.size)

    @property
    def job_ranks(self) -> tuple[int, ...]:
        """The numbers of these ranks in the job."""
        return tuple(range(self.size)) if self.groups.ranks is None else self.groups.ranks

    @property
    def job_rank(self) -> int:
        """This rank's number in the job, also seen from a part of its ranks."""
        return self.rank if self.groups.ranks is None else self.groups.ranks[self.rank]

    @property
    def backend(self) -> str:
        """The backend of the groups, such as "gloo" or "nccl"; "no backend" in a world of one."""
        if self.group is None:
            return "no backend"
        with suppress(ValueError, RuntimeError):  # the group was destroyed by other code
            return str(dist.get_backend(self.group))
        return "no backend"

    @property
    def group(self) -> dist.ProcessGroup | None:
        """All ranks; None in a world of one."""
        return self.groups.default

    @property
    def store(self) -> dist.Store | None:
        """The key-value store of this world; None in a world of one."""
        return self.groups.store

    @property
    def sockets(self) -> SocketAborter:
        """The connections of this world, which another thread may shut."""
        return self.groups.sockets

    @property
    def node(self) -> dist.ProcessGroup | None:
        """The ranks of my host (None in a world of one). The first use must happen on all ranks."""
        return self._subgroup("node")

    @property
    def cross(self) -> dist.ProcessGroup | None:
        """My peers, the ranks of my local rank on every host. The first use must happen on all ranks."""
        return self._subgroup("cross")

    def new_group(
        self,
        *,
        timeout_seconds: float | None = None,
        backend: str | None = None,
        ranks: Sequence[int] | None = None,
    ) -> dist.ProcessGroup | None:
        """Make another group of all ranks, with its own connections, so that traffic cannot interleave.

        To be called by all ranks in the same order. `backend`: another one than that of the world. `ranks`: those
        alone, ascending; the others get None.
        """
        if self.size == 1:
            return None
        self.session.let_go()
        wait = timedelta(seconds=timeout_seconds or self.timeout_seconds)
        if ranks is None:
            return self._make_group("a group", list(range(self.size)), wait, backend)
        if self.groups.ranks is not None and self.rank not in ranks:
            self.topic("a group")  # the others count it
            return None
        made = self._make_group("a group", list(ranks), wait, backend)
        return made if self.rank in ranks else None

    def new_host_groups(
        self, width: int | None = None, *, timeout_seconds: float | None = None, backend: str | None = None
    ) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Make groups as `cross` and `node` are, with their own connections; to be called by all ranks.

        `width`: consecutive ranks that count as one host; None: those of each host.
        """
        self.session.let_go()
        wait = timedelta(seconds=timeout_seconds or self.timeout_seconds)
        cross, node = (self._make_subgroup(name, wait, backend, width) for name in ("cross", "node"))
        return cross, node

    def drop_group(self, group: dist.ProcessGroup) -> None:
        """Close the connections of a group that `new_group` made; the other ranks do so in their own time."""
        with suppress(ValueError):  # it is gone already: all of them go with the default group
            dist.destroy_process_group(group)

    def find_refusal(self) -> PlanError | None:
        """Return the refusal that a rank of the job left for all, once; None if there is none."""
        job = current.world
        if job is None or job.store is None:
            return None
        known = job.session.keep(_Refusals, _Refusals)
        with suppress(RuntimeError):
            if job.store.check([known.key]):
                message, remedy = json.loads(job.store.get(known.key))
                job.store.add(f"{known.key}/known", 1)
                known.count += 1
                return PlanError(message, remedy=remedy)
        return None

    def topic(self, name: str) -> str:
        """Return a key prefix of the store that is fresh on every use and the same on all ranks."""
        return self.groups.topic(name)

    def enter_forked_child(self) -> None:
        """In a forked child: remain the description of the parent, and refuse everything else."""
        if self.closed:
            return
        self.closed = self.in_forked_child = True
        self.groups.abandon()
        self.session.enter_forked_child()

    def close(self) -> None:
        """Leave: close the groups this world opened. May be called twice."""
        if self.closed:
            return
        self.closed = True
        self.session.close()
        self.groups.close()
        if current.world is self:
            current.world = current.sockets = None
            forget_generation()
            tell_children(None)

    def _subgroup(self, name: str) -> dist.ProcessGroup | None:
        if self.size == 1:
            return None
        if name not in self.groups.subgroups:
            wait = timedelta(seconds=self.timeout_seconds)
            self.groups.subgroups[name] = self._make_subgroup(name, wait, None)
        return self.groups.subgroups[name]

    def _make_group(self, name: str, ranks: list[int], wait: timedelta, backend: str | None) -> dist.ProcessGroup:
        """Make a group of `ranks` of this world; called by these ranks of a part, by all ranks of a whole one."""
        numbers = [self.job_ranks[rank] for rank in ranks]
        if self.groups.ranks is not None:
            return new_part_group(self, numbers, self.topic(name), wait, backend)
        with self.sockets.noticed(), translated(self, f"making {name}"):
            made: dist.ProcessGroup = dist.new_group(numbers, timeout=build_time(wait), backend=backend)
        return set_patience(made, wait) if self.rank in ranks else made

    def _make_subgroup(
        self, name: str, wait: timedelta, backend: str | None, width: int | None = None
    ) -> dist.ProcessGroup:
        """Make the groups `name`, and return this rank's; `width` as in `new_host_groups`."""
        groups = self._enumerate(name, width)
        if self.groups.ranks is not None:
            mine = next(each for each in groups if self.rank in each)
            return self._make_group(f"the {name} group", mine, wait, backend)
        made: dist.ProcessGroup | None
        with self.sockets.noticed(), translated(self, f"making the {name} groups"):
            made, _ = dist.new_subgroups_by_enumeration(groups, timeout=build_time(wait), backend=backend)
        assert made is not None, f"rank {self.rank} is in none of {groups}"
        return set_patience(made, wait)

    def _enumerate(self, name: str, width: int | None = None) -> list[list[int]]:
        width = width or self.local_size
        if self.size % width:
            raise ConfigError(f"{self.size} ranks on hosts of {self.local_size}: node groups need equal hosts")
        hosts = [list(range(i, i + width)) for i in range(0, self.size, width)]
        return hosts if name == "node" else [list(peers) for peers in zip(*hosts, strict=True)]


@dataclass
class _Current:
    """The world of this process."""

    world: World | None = None
    sockets: SocketAborter | None = None
    """Those of the world, also while it is being made."""
    parents: World | None = None
    """In a forked child: the world of the process it was forked from."""
    has_parents_group: bool = False
    """In a forked child: whether torch's default group is there, and the parent's."""


current = _Current()
"""Set by `connect` and by `World.close`."""


def world() -> World:
    """Return the current world; raise `ConfigError` if `init` was not called.

    In a forked child of a rank it is the parent's: rank, size and host can be read, and nothing else.
    """
    if current.world is None:
        if current.parents is not None:
            return current.parents
        report_uncaught_errors()
        raise ConfigError("there is no world yet", remedy="call farandole.init() first")
    return current.world


def has_world() -> bool:
    """Return whether `connect` has made a world that is still open, in this process."""
    return current.world is not None


_LOOK_SECONDS, _AFTER_SHUT_SECONDS = 0.1, 1.0
"""How often a wait looks whether the world's sockets are shut, and how long it still waits then."""


def wait_while_open(here: World, work: dist.Work) -> None:
    """Wait for what one of the world's groups does; raise `PeerLost` soon after the world's sockets were shut.

    An operation of gloo that meets a connection which is shut already waits on for its time-out, and so does who
    drops its group (measured): the groups are kept for ever then.
    """
    done = threading.Event()
    work.get_future().add_done_callback(lambda _: done.set())
    while not done.wait(_LOOK_SECONDS):
        if here.sockets.shut_down and not done.wait(_AFTER_SHUT_SECONDS):
            groups = dist.distributed_c10d._world.pg_map if dist.is_initialized() else {}
            forks.keep_for_ever([work, *groups])
            refuse_if_ended(here, "a wait for other ranks")
    with translated(here, "a wait for other ranks"):
        work.wait()


def refused_by_all(refusal: PlanError) -> PlanError:
    """Return what all ranks raise where this one refuses. See [Note: a refusal of some] in `comm_errors`."""
    here = world()
    if here.store is not None:
        key = here.session.keep(_Refusals, _Refusals).key
        with suppress(RuntimeError):  # the store is gone: another rank has ended, and says why
            here.store.compare_set(key, "", json.dumps([refusal.message, refusal.remedy]))
            refusal = here.find_refusal() or refusal
            shut_at, end = time.monotonic() + _OWN_SECONDS, time.monotonic() + _OWN_SECONDS + _TELL_SECONDS
            while here.store.add(f"{key}/known", 0) < here.size and time.monotonic() < end:
                if time.monotonic() > shut_at and not here.sockets.shut_down:
                    here.sockets.shut(but=here.store)
                time.sleep(0.01)
    return refusal


def escape() -> None:
    """End whatever this process waits for in its world, from another thread. See [Note: how to leave]."""
    sockets = current.sockets
    if sockets is not None:
        sockets.shut()
