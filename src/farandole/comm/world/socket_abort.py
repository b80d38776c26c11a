"""Getting out of an exchange that will never end: shutting the sockets of a world from another thread.

[Note: how to leave] A rank that waits for a dead rank is freed by the kernel; one that waits for a rank that
waits for it is not, and gloo has no way to give up (measured: it waits for its time-out, and dropping the
group waits too). But ``shutdown(2)`` on its sockets ends the wait within milliseconds, and the group can then be
dropped. So a world notes which sockets were opened while it connected, and no others: a program's own
connections are left alone, also those that another thread opens in Python meanwhile. Each rank must shut its own;
that one did frees no other.
"""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from ...core.host.open_sockets import Key, borrowed, open_sockets, sockets_of_other_threads

_noticed: set[Key] = set()
"""Those of all worlds of this process: a store outlives the world that opened it."""


def noticed_sockets() -> set[Key]:
    """Return what the worlds of this process have opened, open or not."""
    return set(_noticed)


class SocketAborter:
    """The sockets of one world. `shut` may be called by any thread, also while the world still connects."""

    def __init__(self) -> None:
        self._known: set[Key] = set()
        self._before: list[tuple[set[Key], weakref.WeakSet[socket.socket]]] = []
        self._lock = threading.Lock()
        self.shut_down = False
        """Whether `shut` was called: the world is of no more use."""

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """Take the sockets that are opened meanwhile for this world's."""
        with sockets_of_other_threads() as others:
            mark = (open_sockets(), others)
            with self._lock:
                self._before.append(mark)
            try:
                yield
            finally:
                now = open_sockets()
                opened = _opened_since(mark, now)
                for descriptor, _ in opened:
                    _end_with_this_program(descriptor)
                with self._lock:
                    self._before[:] = [other for other in self._before if other is not mark]
                    self._known = (self._known & now) | opened
                _noticed.intersection_update(now)
                _noticed.update(opened)
        if self.shut_down:
            self.shut()

    def shut(self, *, but: dist.Store | None = None) -> int:
        """End all traffic of the world, but that of a store; return how many connections were shut."""
        port = None if but is None else _port_of(but)
        with self._lock:
            self.shut_down = True
            now = open_sockets()
            mine = self._known & now
            for mark in self._before:
                mine |= _opened_since(mark, now)
            return sum(_shut(descriptor, but=port) for descriptor, _ in mine)


def _opened_since(mark: tuple[set[Key], weakref.WeakSet[socket.socket]], now: set[Key]) -> set[Key]:
    """Return which sockets of `now` are neither of before `mark` nor another thread's."""
    before, others = mark
    theirs = {other.fileno() for other in list(others)}
    return {key for key in now - before if key[0] not in theirs}


def _end_with_this_program(descriptor: int) -> None:
    """Let no program that this one starts (``os.system``) inherit a connection, and hold it when we are gone."""
    with suppress(OSError):
        os.set_inheritable(descriptor, False)


def _port_of(store: dist.Store) -> int | None:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return getattr(store, "port", None)


def _shut(descriptor: int, *, but: int | None = None) -> bool:
    """Shut a connection, not a listener: none of port `but`; a wait for new ones is not blocked by a peer."""
    try:
        with borrowed(descriptor) as ours:
            if ours.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            if but in (ours.getpeername()[1], ours.getsockname()[1]):
                return False
            ours.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True
