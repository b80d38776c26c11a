"""What connects this rank with the others: torch's process groups, the store, and the sockets of both."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...core.environ.env import read_nonce
from . import forks
from .comm_errors import Member, translated
from .socket_abort import SocketAborter

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
