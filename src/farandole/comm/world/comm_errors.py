"""Failures of the backend and of the store, as errors of ours; and the way out of an exchange that never ends.

[Note: one translation] Every call of torch's store and of its groups is made inside `translated`. A rank that is
gone shows up at whichever call comes next, and a job that goes on after a failure (an elastic one, or a user's own
loop) decides by the kind of error. A style test finds the calls that are outside.

[Note: a refusal of some] A proof may fail on some ranks, while the others wait for them in a later exchange and
would only see that they are gone. So those that refuse leave the refusal in the store and, if the others do not
come to one of their own soon, shut all connections but the store's: who waits then finds it, and raises the same.
"""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import torch.distributed as dist

from ...core.failures import first_line, is_peer_lost, is_timeout, waited_seconds
from ...core.host.open_sockets import Key, borrowed, open_sockets, sockets_of_other_threads
from ...core.vocabulary.errors import CommError, PeerLost, PlanError, Stalled

LOST = (PeerLost, Stalled)
"""What says that a rank is lost, and not that ranks disagree."""
_ENDED = "this generation of ranks has ended: one of them is gone"


class Member(Protocol):
    """What errors say of a `World`."""

    @property
    def job_rank(self) -> int:
        """See `World`."""

    @property
    def size(self) -> int:
        """See `World`."""

    @property
    def timeout_seconds(self) -> float:
        """See `World`."""

    @property
    def in_forked_child(self) -> bool:
        """See `World`."""

    @property
    def sockets(self) -> SocketAborter:
        """See `World`."""

    def find_refusal(self) -> PlanError | None:
        """See `World`."""


@contextmanager
def translated(world: Member, operation: str, *, bucket: int | None = None) -> Iterator[None]:
    """Raise what the store or a group raises as a `CommError`. See [Note: one translation].

    Nothing is asked any more once the world's sockets are shut on purpose: that is a `PeerLost` at once.
    """
    refuse_if_ended(world, operation, bucket=bucket)
    try:
        yield
    except RuntimeError as problem:
        raise translate_error(problem, world, operation, bucket=bucket) from None


def refuse_if_ended(world: Member, operation: str, *, bucket: int | None = None) -> None:
    """Raise `PeerLost` when the sockets of the world were shut on purpose, `CommError` in a forked child."""
    if world.in_forked_child and world.size > 1:
        raise CommError(
            "this process was forked from that rank, and is no rank itself",
            rank=world.job_rank,
            operation=operation,
            bucket=bucket,
            remedy="ask the other ranks in the process that called farandole.init()",
        )
    if world.sockets.shut_down:
        raise translate_error(RuntimeError(_ENDED), world, operation, bucket=bucket)


def translate_error(
    problem: RuntimeError, world: Member, operation: str, *, bucket: int | None = None
) -> CommError | PlanError:
    """Turn a failure of the backend into ours: which ranks are gone or late, as far as it knows, or a refusal."""
    kind: type[CommError] = PeerLost
    text, remedy = str(problem), "look for the first failure among the other ranks"
    if world.sockets.shut_down:
        what = _ENDED
    elif is_timeout(text):
        kind, what = Stalled, f"no answer within {waited_seconds(text) or world.timeout_seconds:g} s"
        remedy = "another rank is stuck, or did not make this call"
    elif isinstance(problem, dist.DistNetworkError):
        what = f"the store, which rank 0 serves, is gone: {first_line(problem)}"
        remedy = "look for the first failure of rank 0"
    elif is_peer_lost(text):
        what = "another rank closed its connection"
    else:
        kind, what, remedy = CommError, first_line(problem), ""
    # After a time-out the store may not answer either, and has no time-out of its own for this question.
    refusal = world.find_refusal() if kind is PeerLost and not world.sockets.shut_down else None
    return refusal or kind(what, rank=world.job_rank, operation=operation, bucket=bucket, remedy=remedy)


# Getting out of an exchange that will never end: shutting the sockets of a world from another thread.
#
# [Note: how to leave] A rank that waits for a dead rank is freed by the kernel; one that waits for a rank that
# waits for it is not, and gloo has no way to give up (measured: it waits for its time-out, and dropping the group
# waits too). But ``shutdown(2)`` on its sockets ends the wait within milliseconds, and the group can then be
# dropped. So a world notes which sockets were opened while it connected, and no others: a program's own
# connections are left alone, also those that another thread opens in Python meanwhile. Each rank must shut its
# own; that one did frees no other.


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
