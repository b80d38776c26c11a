"""Stall inspector: operations that wait too long, reported on rank 0 with the stacks of the missing ranks.

A rank whose operation waits too long reports the missing ranks to rank 0. Rank 0 asks them; their control
threads answer with the stack of the main thread, also when that one is stuck. Then rank 0 writes one report. Costs
nothing while nothing waits: no message, no timer.
"""

from __future__ import annotations

import json
import linecache
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from ...core.host.stacks import stack_of
from ...core.vocabulary.errors import Stalled
from .channel import Frame
from .driver import ControllerState, Driver
from .operations import NamedOpsSettings, Operation

_ANSWER_SECONDS = 1.0
"""For a missing rank to say where it is."""
_FRAMES = 12
_DRIVER = Driver.drive.__code__.co_filename
_TENSORS = 20


class StallInspector:
    """Called with the engine's lock held."""

    def __init__(self, state: ControllerState, settings: NamedOpsSettings, end: Callable[..., None]) -> None:
        """`end`: `Shutdown.end`."""
        self._state, self._end = state, end
        self._warning_seconds = settings.stall_warning_seconds
        self._shutdown_seconds = settings.stall_shutdown_seconds
        self._sleeps_soundly = True
        """The control thread sleeps without a timer."""
        self._told_seconds: dict[Any, float] = {}
        """When rank 0 was last told of an operation, by the operation."""
        self._overdue: dict[int, dict[str, float]] = {}
        """On rank 0: names and how long they wait, by missing rank."""
        self._places: dict[int, str] = {}
        """On rank 0: what missing ranks answered."""
        self._report_at_seconds: float | None = None

    def arm(self) -> None:
        """Something is on its way: the control thread must look after it."""
        if self._sleeps_soundly and self._period():
            self._sleeps_soundly = False
            assert self._state.links is not None, "stalls are watched where there are links"
            self._state.links.wake()

    def look(self, *, has_slept: bool) -> float | None:
        """Tell what is overdue; return how long the control thread may sleep.

        `has_slept`: nothing happened for as long as the last call said. The timer ends only then: to begin it
        again takes a wake-up, which would cost each operation more than all the rest.
        """
        period = self._period()
        if not period:
            return None
        now = time.monotonic()
        if self._report_at_seconds is not None and (now >= self._report_at_seconds or self._all_answered()):
            self._report()
        waits = [] if self._report_at_seconds is None else [self._report_at_seconds - now]
        in_flight = self._state.in_flight
        oldest = next(iter(in_flight.values()), None)
        if oldest is not None and now < (due := self._due(oldest, period)):
            waits.append(due - now)  # the later ones were submitted later
        else:
            waits += self._tell_overdue(now, period)
        if len(self._told_seconds) > len(in_flight):
            current = set(in_flight.values())
            self._told_seconds = {op: told for op, told in self._told_seconds.items() if op in current}
        self._sleeps_soundly = has_slept and not in_flight and not waits
        return None if self._sleeps_soundly else max(0.01, min(waits, default=period))

    def _tell_overdue(self, now: float, period: float) -> list[float]:
        """Tell what is overdue, again each period; return when to look next, if something is on its way."""
        for operation in list(self._state.in_flight.values()):
            due = self._due(operation, period)
            if now < due:
                return [due - now]
            self._told_seconds[operation] = now
            self._tell(operation, now - operation.submitted_seconds)
        return []

    def _due(self, operation: Operation, period: float) -> float:
        return self._told_seconds.get(operation, operation.submitted_seconds) + period

    def take(self, rank: int, kind: int, data: bytes) -> None:
        """Take a frame about stalls."""
        if kind == Frame.OVERDUE:
            name, missing, seconds = json.loads(data)
            self._note(name, missing, seconds)
        elif kind == Frame.WHERE:
            self._state.send(0, Frame.HERE, main_thread_place().encode())
        else:
            self._places[rank] = data.decode(errors="replace")
        if self._state.links is not None:
            self._state.links.wake()  # another thread may have taken it: when to look next has changed

    def _period(self) -> float:
        chosen = [seconds for seconds in (self._warning_seconds, self._shutdown_seconds) if seconds > 0]
        return min(chosen, default=0.0)

    def _tell(self, operation: Any, seconds: float) -> None:
        state = self._state
        missing = state.missing(operation)
        if not missing:
            return  # the data is moving
        told = [operation.signature.name, missing, seconds]
        if state.rank == 0:
            self._note(*told)
        else:
            state.send(0, Frame.OVERDUE, json.dumps(told).encode())
            state.flush()

    def _note(self, name: str, missing: list[int], seconds: float) -> None:
        """On rank 0: an operation waits for ranks."""
        state = self._state
        for rank in missing:
            tensors = self._overdue.setdefault(rank, {})
            tensors[name] = max(seconds, tensors.get(name, 0.0))
            if rank in self._places:
                continue
            if rank == state.rank:
                self._places[rank] = main_thread_place()
            elif len(tensors) == 1:
                state.send(rank, Frame.WHERE)
        state.flush()
        if self._report_at_seconds is None:
            self._report_at_seconds = time.monotonic() + _ANSWER_SECONDS

    def _all_answered(self) -> bool:
        return all(rank in self._places for rank in self._overdue)

    def _report(self) -> None:
        overdue, places = self._overdue, self._places
        self._overdue, self._places, self._report_at_seconds = {}, {}, None
        longest = max((seconds for tensors in overdue.values() for seconds in tensors.values()), default=0.0)
        shutdown = 0 < self._shutdown_seconds <= longest
        text = report(overdue, places, self._state.hosts, longest, self._shutdown_seconds if shutdown else 0.0)
        if self._warning_seconds:
            sys.stderr.write(text)
            sys.stderr.flush()
        if shutdown:
            self._end(self._state.error(text.strip(), kind=Stalled), tell=True)


def report(
    overdue: dict[int, dict[str, float]], places: dict[int, str], hosts: list[str], seconds: float, limit: float
) -> str:
    """Return the report: which tensors wait for which ranks, and where those are. `limit`: it ends the job."""
    lines = [
        "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are "
        f"waiting for remainder of ranks for more than {seconds:.0f} seconds. This may indicate that different "
        "ranks are trying to submit different tensors or that only subset of ranks is submitting tensors, which "
        "will cause deadlock. ",
        "Missing ranks:",
    ]
    for rank, tensors in sorted(overdue.items()):
        names = list(tensors)
        more = f", and {len(names) - _TENSORS} more" if len(names) > _TENSORS else ""
        mark = "!" if limit else ""
        lines.append(f"{rank}{mark}: [{', '.join(names[:_TENSORS])}{more}]")
        lines.append(f"  rank {rank} (on {hosts[rank]}) {'is here:' if rank in places else 'does not answer'}")
        lines += [f"    {line}" for line in places.get(rank, "").splitlines()]
    if limit:
        lines.append(
            f'One or more rank (marked by "!") is stalled for longer than {limit:g} seconds. Will shutdown.'
        )
    return "\n".join(lines) + "\n"


def main_thread_place() -> str:
    """Return the stack of this process's main thread, innermost last.

    Where that thread is the one that took the question, only what it was at before counts.
    """
    places = stack_of(threading.main_thread().ident or 0)
    drives = [number for number, each in enumerate(places) if each[::2] == (_DRIVER, Driver.drive.__name__)]
    places = places[drives[-1] :] if drives else places
    if not places:
        return "its main thread has ended"
    lines = []
    for file, line, function in reversed(places[:_FRAMES]):
        lines += [f'  File "{file}", line {line}, in {function}', f"    {linecache.getline(file, line).strip()}"]
    return "\n".join(line for line in lines if line.strip())
