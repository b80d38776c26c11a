"""What connects this rank with the others: torch's process groups, the store, and the sockets of both."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...core.environ.env import read_nonce
from . import forks
from .socket_abort import SocketAborter

BUILD_SECONDS = 5.0
"""In an elastic job, for ranks that have met to connect: one that dies meanwhile is not waited for longer."""


@dataclass(eq=False)
class ProcessGroups:
    """The connections of one world; empty in a world of one."""

    default: dist.ProcessGroup | None = None
    """All ranks."""
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
        return f"{name}/{count}"

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


def set_patience(group: dist.ProcessGroup, wait: timedelta) -> dist.ProcessGroup:
    """Give operations of a group their own time: it was built with less in an elastic job."""
    if build_time(wait) != wait:
        dist.distributed_c10d._set_pg_timeout(wait, group)
    return group
