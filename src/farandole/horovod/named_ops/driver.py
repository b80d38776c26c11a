"""A thread that waits for a small operation reads the control connections itself.

[Note: who reads the links] By default the control thread does. A result then costs two switches between threads:
to the control thread, and to the one that waits. So a thread that waits for a small operation borrows the links:
the control thread sleeps on, and the waiting thread takes what arrives until its result is there. Only one thread
borrows at a time; others sleep until their operation is finished. It looks a few times before it sleeps, because
to wake a core takes longer than the message.

[Note: the loan] In a loop of small operations the announcement of a rank that is ahead arrives while this one is
still at work in Python: the control thread would wake up and compete for the interpreter. So after `_LOOP_WAITS`
waits that follow each other fast the links stay lent. The control thread takes them back when it looks after them
and no thread has waited again; what shows that no thread will wait ends the loan at once: a second operation in
flight, a large one, a callback, a question whether it is done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from ...comm.world.world import World
from ...core.vocabulary.errors import CommError
from .channel import ControlChannel, Events, Frame
from .data_plane import DataPlane
from .matcher import Matcher
from .operations import Operation, OperationLog, PendingTicket

_LOOP_SECONDS, _LOOP_WAITS = 0.002, 8
"""So many waits that follow each other faster than this are a loop."""
_LOAN_SECONDS = 0.01
"""How often the control thread looks after a loan: at most so long lies what no thread of this rank waits for."""
_LOOK_SECONDS = 60e-6
"""So long a waiting thread looks before it sleeps: about twice what waking a core takes."""


class Driver:
    """Who reads the links of one rank, when it is not the control thread."""

    def __init__(self, state: ControllerState, serve: Callable[[Events], None], *, has_free_cores: bool) -> None:
        """`serve` takes what `ControlChannel.poll` found. `has_free_cores`: this host has one for each rank."""
        self._state, self._serve = state, serve
        self._look_seconds = _LOOK_SECONDS if has_free_cores else 0.0
        self._baton = threading.RLock()
        """Held by the thread that reads the links; again by its signal handlers, which may wait too."""
        self._thread = 0
        self._ticket: PendingTicket | None = None
        """What it waits for."""
        self._is_lent = False
        """The control thread does not see what arrives."""
        self._is_timed = False
        """The control thread looks after the loan."""
        self._waited_seconds = 0.0
        """When a thread last had its result."""
        self._fast_waits = 0
        """How many followed each other fast."""

    def drive(self, ticket: PendingTicket) -> None:
        """Return when the operation is done, or another thread will finish it. Without the lock."""
        if not ticket.is_done and self._baton.acquire(blocking=False):
            try:
                self._read_until_done(ticket)
            finally:
                self._baton.release()
        now = time.monotonic()
        is_fast, self._waited_seconds = now - self._waited_seconds < _LOOP_SECONDS, now
        self._fast_waits = self._fast_waits + 1 if is_fast else 0
        is_loop = self._fast_waits >= _LOOP_WAITS
        if self._is_lent != is_loop or self._is_timed != is_loop or self._state.in_flight:
            with self._state.lock:
                self._lend_or_not(is_loop=is_loop)

    def end_loan(self) -> None:
        """Something is on its way that no thread will read the links for. With the lock held."""
        if self._is_lent and self._ticket is None:
            self._take_back()

    def nobody_waits(self) -> None:
        """An operation is to go on by itself. Without the lock."""
        if self._is_lent:
            with self._state.lock:
                self.end_loan()

    def look_after(self) -> float | None:
        """Take back a loan that is over; return when to look again. By the control thread, with the lock held."""
        if not self._is_timed:
            return None
        if self._is_lent and time.monotonic() - self._waited_seconds < _LOOP_SECONDS:
            return _LOAN_SECONDS
        self._is_timed = False
        self.end_loan()
        return None

    def wait_until_free(self) -> None:
        """Return when no thread reads the links. All operations are done; the lock is not held."""
        with self._baton:
            pass

    def forget(self) -> None:
        """In a forked child: no thread reads."""
        self._baton = threading.RLock()
        self._ticket = None

    def _read_until_done(self, ticket: PendingTicket) -> None:
        state, interrupted = self._state, self._ticket
        try:
            with state.lock:
                links = state.links
                if links is None or not links.is_open or ticket.is_done:
                    return
                self._ticket, self._thread = ticket, threading.get_ident()
                ticket.call_on_finish(self._finished)
                if not self._is_lent:
                    self._lend(links)
            events = self._look(links.look)
            while not ticket.is_done:
                events = events or links.poll_lent()
                with state.lock:
                    if not ticket.is_done:
                        self._serve(events)
                events = ()
        finally:
            with state.lock:
                self._ticket = interrupted
                if interrupted is not None:
                    self._nudge()  # it may have been finished meanwhile
                elif not ticket.is_done:  # a signal's handler broke the wait off
                    self.end_loan()

    def _look(self, look: Callable[[], Events]) -> Events:
        """Return what arrives soon, without sleep."""
        if not self._look_seconds:
            return ()
        until = time.monotonic() + self._look_seconds
        while not (events := look()) and time.monotonic() < until:
            pass
        return events

    def _finished(self, ticket: PendingTicket) -> None:
        """Wake the thread that waits for `ticket`, if it is not the one that finished it. With the lock held."""
        if ticket is not self._ticket or self._thread != threading.get_ident():
            self._nudge()

    def _nudge(self) -> None:
        links = self._state.links
        if links is not None and links.is_open:
            links.nudge()

    def _lend_or_not(self, *, is_loop: bool) -> None:
        """Keep what was borrowed, borrow it for the next operation, or give it back. With the lock held."""
        links = self._state.links
        if links is None or not links.is_open or self._ticket is not None:
            return
        if not is_loop or self._state.in_flight:
            self.end_loan()
            return
        if not self._is_lent:
            self._lend(links)
        if not self._is_timed:
            self._is_timed = True
            links.wake()

    def _lend(self, links: ControlChannel) -> None:
        self._is_lent = True
        links.lend()

    def _take_back(self) -> None:
        self._is_lent = False
        links = self._state.links
        if links is not None and links.is_open:
            links.take_back()


# What the parts of one rank's controller share: its operations in flight, and the ways to the other ranks.


class ControllerState:
    """Owned by the controller. Everything is called with `lock` held."""

    def __init__(self, world: World, log: OperationLog) -> None:
        self.lock = threading.RLock()
        self.rank, self.size = world.rank, world.size
        self.hosts = [world.host]
        """The host of each rank."""
        self.log = log
        self.matcher = Matcher(world.rank, world.size)
        self.in_flight: dict[tuple[int, str], Operation] = {}
        self.links: ControlChannel | None = None
        """The control connections; None in a world of one."""
        self.plane: DataPlane | None = None
        """What moves large tensors; None in a world of one."""

    def refuse_reentry(self) -> None:
        """Raise `CommError` in a signal handler that has interrupted its own thread while it holds the lock.

        A frame is half written or half read then, and what the handler waits for may be just that frame.
        """
        if self.lock._is_owned():  # type: ignore[attr-defined]  # as `threading.Condition` asks
            raise self.error(
                "a signal handler used named operations while its thread was sending or reading messages of them",
                remedy="set a flag in the handler, and call between two steps of the loop",
            )

    def send(self, rank: int, kind: Frame, data: bytes = b"", number: int = 0) -> None:
        """Queue a frame; it leaves at the next `flush`, or when the control thread wakes up."""
        if self.links is not None and rank != self.rank:
            self.links.send(rank, kind, number, data)

    def flush(self) -> None:
        """Send what is queued."""
        if self.links is not None:
            self.links.flush()

    def error(self, text: str, remedy: str = "", *, kind: type[CommError] = CommError) -> CommError:
        """Return an error of this rank's negotiation."""
        return kind(text, rank=self.rank, operation="negotiation", remedy=remedy)

    def missing(self, operation: Operation) -> list[int]:
        """Return the members that have not announced the operation."""
        slot = self.matcher.slots.get(operation.signature.key)
        return [] if slot is None else self.matcher.missing(operation, slot)

    def finish(self, operation: Operation, value: Any, error: Exception | None = None) -> None:
        """Give the operation its result, or its error; what comes second is ignored."""
        if operation.ticket.is_done:
            return
        self.in_flight.pop(operation.known.key, None)
        operation.payloads = []
        if self.log.is_on:
            signature = operation.signature
            text = "" if error is None else str(error)
            self.log.finished(signature.name, signature.dtype, signature.shape, time.monotonic(), text)
        operation.ticket.finish(value, error)
