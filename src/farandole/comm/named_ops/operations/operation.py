"""One rank's operation from submission to result, and the ticket its submitter holds."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ...device.streams import streams_of
from ...transport.comm_thread import BucketWork
from .request import Request, Travel
from .response_cache import CacheEntry
from .signature import Signature

_making_gates = threading.Lock()


class TicketDriver(Protocol):
    """Who can bring an operation to its end in the thread that waits for it."""

    def drive(self, ticket: PendingTicket) -> None:
        """Return when the operation is done, or another thread will finish it; also called when it is done."""

    def nobody_waits(self) -> None:
        """An operation is to go on by itself."""


class PendingTicket:
    """A `request.Ticket`. `before_wait` is called before a thread goes to sleep for it.

    Without a `driver` a waiting thread sleeps until another one finishes the operation.
    """

    __slots__ = (
        "_before_wait", "_callbacks", "_carrier", "_codec", "_done", "_driver", "_error", "_gate", "_is_kept",
        "_on_finish", "_travel", "_value", "waits_since_seconds",
    )  # fmt: skip

    def __init__(self, before_wait: Callable[[], None], driver: TicketDriver | None = None) -> None:
        self._before_wait = before_wait
        self._driver = driver
        self._on_finish: Callable[[PendingTicket], None] | None = None
        self._done = False
        self._value: Any = None
        self._error: Exception | None = None
        self._gate: threading.Lock | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._carrier: tuple[BucketWork, float] | None = None
        """What carries the operation, and which share of that it is; until it is done, as it holds tensors."""
        self._codec = ""
        self._is_kept = False
        """Whether the result is kept for the stream of who waits."""
        self._travel = Travel(0.0, 0.0, 0)
        self.waits_since_seconds: float | None = None
        """When a thread first began to wait for it; None: none did."""

    def done(self) -> bool:
        """See `request.Ticket`."""
        driver = self._driver
        if driver is not None and not self._done:
            driver.nobody_waits()
        return self._done

    @property
    def is_done(self) -> bool:
        """Whether it is done, for who brings it to its end."""
        return self._done

    def wait(self) -> Any:
        """See `request.Ticket`. May be called by several threads, and again."""
        self._before_wait()  # also when it is done: others may wait for what this rank has not sent yet
        if not self._done and self.waits_since_seconds is None:
            self.waits_since_seconds = time.monotonic()
        driver = self._driver
        if driver is not None:
            driver.drive(self)
        if not self._done:
            self._sleep()
        if self._error is not None:
            raise copy.copy(self._error)  # each caller's own, so that tracebacks do not grow
        if self._is_kept:
            for each in self._value if isinstance(self._value, tuple) else (self._value,):
                streams = streams_of(each.device)
                if streams is not None:
                    streams.keep(each)
        return self._value

    def keep_result(self) -> None:
        """The result is made on a stream of its own: see [Note: done on the device] in `group_thread`."""
        self._is_kept = True

    def carried_by(self, work: BucketWork, share: float, codec: str) -> None:
        """Note what carries the operation, which share of that it is, and by which codec."""
        self._carrier, self._codec = (work, share), codec

    def sent_at_once(self, at_seconds: float, sent_bytes: int) -> None:
        """Note that the operation's data travelled with its announcement."""
        self._travel = Travel(at_seconds, at_seconds, sent_bytes)

    def travel(self) -> Travel:
        """See `request.Ticket`."""
        return self._travel

    def _arrive(self, end_seconds: float) -> None:
        carrier, self._carrier = self._carrier, None
        if carrier is None:
            self._travel = self._travel._replace(end_seconds=end_seconds)
            return
        work, share = carrier
        self._travel = Travel(
            work.begin_seconds or end_seconds,
            end_seconds,
            round(share * work.sent_bytes),
            work.wait_seconds,
            work.codec_seconds,
            max(1, work.rounds),
            self._codec,
        )

    def call_when_done(self, callback: Callable[[], None]) -> None:
        """See `request.Ticket`."""
        self._callbacks.append(callback)
        driver, self._driver = self._driver, None  # who waits when the callback was called does not wait
        if self._done:
            self._call_all()
        elif driver is not None:
            driver.nobody_waits()

    def call_on_finish(self, wake: Callable[[PendingTicket], None]) -> None:
        """Call `wake` when the operation is done. For the driver, with the engine's lock held."""
        self._on_finish = wake

    def finish(self, value: Any, error: Exception | None = None) -> None:
        """Wake all waiting threads; a second call is ignored."""
        if self._done:
            return
        self._value, self._error = value, error
        self._arrive(time.monotonic())
        self._done = True
        if self._gate is not None:
            self._gate.release()
        if self._on_finish is not None:
            self._on_finish(self)
        self._call_all()

    def _call_all(self) -> None:
        # Called by who finishes, and by who asks after that. `pop` gives each callback to one of them.
        while self._callbacks:
            try:
                callback = self._callbacks.pop()
            except IndexError:
                return
            callback()

    def _sleep(self) -> None:
        with _making_gates:
            if self._gate is None:
                gate = threading.Lock()
                gate.acquire()
                self._gate = gate
        # `finish` sets `_done` first and looks for a gate then; here it is the other way round. So either the gate
        # is opened, or it is known here that it will not be.
        if not self._done:
            self._gate.acquire()
            self._gate.release()


@dataclass(eq=False, slots=True)
class Operation:
    """What this rank submitted."""

    request: Request
    known: CacheEntry
    tensor: torch.Tensor | None
    """The request's, without its history."""
    members: tuple[int, ...]
    """World ranks, ascending."""
    ticket: PendingTicket
    submitted_seconds: float
    group: Group | None = None
    told: dict[int, Signature] = field(default_factory=dict)
    """What each present member said, by rank ascending; once all are ready."""
    absent: tuple[int, ...] = ()
    payloads: list[bytearray | None] = field(default_factory=list)
    """What each present member sent along, while it is not used yet."""
    ready_event: Any = None
    """On a GPU: the tensor is written when this has happened."""

    @property
    def signature(self) -> Signature:
        """What this rank asks for."""
        return self.known.signature

    @property
    def size(self) -> int:
        """Members, absent ones too."""
        return len(self.members)

    @property
    def present(self) -> tuple[int, ...]:
        """Members that take part."""
        return tuple(self.told)


@dataclass(eq=False, slots=True)
class Group:
    """Operations that run together, or none of them."""

    operations: list[Operation]
    not_ready: int
    failed: bool = False
