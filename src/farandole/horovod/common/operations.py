"""Operations of all front ends: their names, how they are submitted, and whose errors they raise.

The engine's errors become Horovod's here and nowhere else: what this rank alone can see is wrong is a ValueError
at once, everything else a `HorovodInternalError` on all ranks.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.vocabulary.errors import CommError, ConfigError
from ..named_ops.operations import EVERYBODY, NO_NAME, Request, Ticket
from .basics import basics
from .exceptions import from_comm_error
from .process_sets import UNKNOWN, ProcessSet


@dataclass
class OperationNames:
    """Counters of unnamed operations. One for all front ends, so that names of two cannot be the same."""

    _unnamed: Counter[tuple[str, int]] = field(default_factory=Counter)
    _joins: int = 0
    _taken: threading.local = field(default_factory=threading.local)
    """This thread's last number of an unnamed operation, until the operation was begun."""

    def clear(self) -> None:
        """Forget everything: the job is over."""
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

    def begun(self) -> None:
        """The operation of the last name was begun: its number is used."""
        self._taken.last = None

    def _give_back(self) -> None:
        """Take back a number whose operation this rank refused: the other ranks still expect it."""
        last = getattr(self._taken, "last", None)
        if last is not None and self._unnamed[last[:2]] == last[2]:
            self._unnamed[last[:2]] -= 1
        self._taken.last = None


operation_names = OperationNames()
"""Those of this process."""
basics.call_on_shutdown(operation_names.clear)


def names_of_group(operation: str, name: str | None, process_set: ProcessSet, count: int) -> list[str]:
    """Return the engine's names of the members of a group."""
    base = operation_names.name(operation, name, process_set)
    return [f"{base}_{i + 1}of{count}" for i in range(count)]


def begin(requests: Sequence[Request]) -> list[Ticket]:
    """Submit `requests`, several as a group.

    Raises:
        ValueError: this rank's arguments are invalid.
        HorovodInternalError: the engine is over.
    """
    try:
        tickets = basics.running.engine.submit(requests)
    except ConfigError as problem:
        raise ValueError(str(problem)) from problem
    except CommError as problem:
        raise from_comm_error(problem) from problem
    operation_names.begun()
    return tickets


def wait(tickets: Sequence[Ticket]) -> list[Any]:
    """Return the results of all `tickets`; nothing of them is in flight when this returns or raises.

    Raises:
        HorovodInternalError: an operation failed.
    """
    if len(tickets) == 1:
        try:
            return [tickets[0].wait()]
        except CommError as error:
            raise from_comm_error(error) from error
    results: list[Any] = []
    problem: CommError | None = None
    for ticket in tickets:
        try:
            results.append(ticket.wait())
        except CommError as error:
            problem = problem or error
    if problem is not None:
        raise from_comm_error(problem) from problem
    return results


def set_number(process_set: ProcessSet, operation: str) -> int:
    """Return the number of a set; raise ValueError, as Horovod words it, for one that has none."""
    number = process_set.process_set_id
    basics.running  # noqa: B018 - not initialised is the first thing to say
    if number is None or process_set.is_stale():
        raise ValueError(f"{operation}: {UNKNOWN} ({process_set})")
    return number
