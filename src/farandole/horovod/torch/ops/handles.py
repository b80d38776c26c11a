"""Handles: every operation of this front end submits a request, returns a handle, and gets a result by it.

A handle is an int, as in Horovod. The engine's errors become Horovod's here and nowhere else: what this rank
alone can see is wrong is a ValueError at once, everything else a `HorovodInternalError` on all ranks in
`synchronize`.

[Note: a name is taken until it is waited for] A small operation is complete when `submit` returns on the rank that
comes last, and on no other. So whether a name is in flight differs between ranks, and a second operation of the
name would be refused on some and wait for ever on the others. Here a name is taken until its handle was
synchronized, or `poll` said that it is done: that is the same on all ranks of one script.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ....comm.named_ops.matching.validation import DUPLICATE
from ....comm.named_ops.operations.request import EVERYBODY, NO_NAME, Request, Ticket
from ....core.vocabulary.errors import CommError, ConfigError
from ...common.basics import basics
from ...common.exceptions import from_comm_error
from ...common.process_sets import UNKNOWN, ProcessSet

Finish = Callable[[list[Any]], Any]
"""Makes what `synchronize` returns out of the results of the requests, in their order."""


class Pending(NamedTuple):
    """What one handle stands for."""

    tickets: list[Ticket]
    finish: Finish
    names: list[tuple[int, str]]
    """Process set and name of each request."""


@dataclass
class Handles:
    """All handles of this process that `synchronize` has not cleared, and the counters of unnamed operations."""

    pending: dict[int, Pending] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _unnamed: Counter[tuple[str, int]] = field(default_factory=Counter)
    _joins: int = 0
    _taken_names: dict[tuple[int, str], int] = field(default_factory=dict)
    """Handles by name. See [Note: a name is taken until it is waited for]."""
    _taken: threading.local = field(default_factory=threading.local)
    """This thread's last number of an unnamed operation, until the operation was begun."""

    def clear(self) -> None:
        """Forget everything: the job is over."""
        self.pending.clear()
        self._taken_names.clear()
        self._numbers = itertools.count()
        self._unnamed.clear()
        self._taken.last = None
        self._joins = 0

    def all_joined(self) -> None:
        """Count unnamed operations anew: until here ranks that had joined ran fewer than the others."""
        self._unnamed.clear()
        self._taken.last = None
        self._joins += 1

    def name(self, operation: str, name: str | None, process_set: ProcessSet) -> str:
        """Return the engine's name for an operation, the same on all members of the set.

        Unnamed operations are counted for each set, because only its members run them.
        """
        self._give_back()
        if name is not None:
            return f"{operation}.{name}"
        number = process_set.process_set_id or EVERYBODY
        self._unnamed[operation, number] += 1
        self._taken.last = operation, number, self._unnamed[operation, number]
        since = f"join{self._joins}." if self._joins else ""
        inside = "" if number == EVERYBODY else f"set{number}."
        return f"{operation}.{NO_NAME}.{since}{inside}{self._unnamed[operation, number]}"

    def _give_back(self) -> None:
        """Take back a number whose operation this rank refused: the other ranks still expect it."""
        last = getattr(self._taken, "last", None)
        if last is not None and self._unnamed[last[:2]] == last[2]:
            self._unnamed[last[:2]] -= 1
        self._taken.last = None

    def submit(self, requests: Sequence[Request], finish: Finish) -> int:
        """Begin `requests`, several as a group, and return the handle."""
        names = [(request.process_set, request.name) for request in requests]
        for name in names:
            if name in self._taken_names:
                raise ValueError(f"{DUPLICATE} ({name[1]}: its handle has not been synchronized)")
        try:
            tickets = basics.running.engine.submit(requests)
        except ConfigError as problem:
            raise ValueError(str(problem)) from problem
        except CommError as problem:
            raise from_comm_error(problem) from problem
        self._taken.last = None
        handle = next(self._numbers)
        self.pending[handle] = Pending(tickets, finish, names)
        self._taken_names.update(dict.fromkeys(names, handle))
        return handle

    def free_names(self, handle: int, pending: Pending) -> None:
        """Let others have the names of an operation that was waited for."""
        for name in pending.names:
            if self._taken_names.get(name) == handle:
                del self._taken_names[name]


handles = Handles()
basics.call_on_shutdown(handles.clear)


def poll(handle: int) -> bool:
    """Return whether the operation of `handle` has ended, so that `synchronize` would not wait.

    Raises:
        ValueError: the handle does not exist or was synchronized.
    """
    pending = handles.pending.get(handle)
    if pending is None:
        raise ValueError(f"Handle {handle} was not created or has been cleared.")
    done = all(ticket.done() for ticket in pending.tickets)
    if done:
        handles.free_names(handle, pending)
    return done


def synchronize(handle: int) -> Any:
    """Wait for the operation of `handle` and return its output.

    Returns:
        The output of the operation; None for a handle that does not exist any more.

    Raises:
        HorovodInternalError: the operation failed: `HorovodMismatchError` if the ranks' requests differ,
            `HorovodPeerLostError` if another rank is gone.
    """
    pending = handles.pending.pop(handle, None)
    if pending is None:
        return None
    handles.free_names(handle, pending)
    if len(pending.tickets) == 1:
        try:
            return pending.finish([pending.tickets[0].wait()])
        except CommError as error:
            raise from_comm_error(error) from error
    results: list[Any] = []
    problem: CommError | None = None
    for ticket in pending.tickets:
        try:
            results.append(ticket.wait())
        except CommError as error:
            # All of a group are waited for: nothing of it may be in flight when this returns.
            problem = problem or error
    if problem is not None:
        raise from_comm_error(problem) from problem
    return pending.finish(results)


def wait_for_all(waits: Iterable[Callable[[], Any]]) -> list[Any]:
    """Call every one of `waits`; return what they did, or raise the first error when all are over.

    So nothing is in flight, and no name is taken, when a caller goes on after an error.
    """
    results: list[Any] = []
    problem: RuntimeError | None = None
    for wait in waits:
        try:
            results.append(wait())
        except RuntimeError as first:
            problem = problem or first
    if problem is not None:
        raise problem
    return results


def set_number(process_set: ProcessSet, operation: str) -> int:
    """Return the number of a set; raise ValueError, as Horovod words it, for one that has none."""
    number = process_set.process_set_id
    basics.running  # noqa: B018 - not initialised is the first thing to say
    if number is None:
        raise ValueError(f"{operation}: {UNKNOWN} ({process_set})")
    return number
