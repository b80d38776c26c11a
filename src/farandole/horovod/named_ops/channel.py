"""The control connections: frames to and from every other rank, collected and sent with few calls.

A frame's tag is its type, in the highest of four bytes, and a number in the others. Nothing here
waits, except `poll` and `poll_lent`. Everything but these, `look` and `wake` is called with the engine's lock
held.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from ...core.framing import HEADER, FrameBuffer, FrameError

NUMBER_MASK = 0xFFFFFF
LARGEST_FRAME_BYTES = 64 * 2**20
_READ_BYTES = 256 * 1024
_COLLECT_SECONDS = 0.0005
"""Time in which frames are collected and then sent together, if no thread waits for them."""


class Frame(IntEnum):
    """What a frame says."""

    DEFINE = 1
    """This number stands for that signature."""
    DATA = 2
    """I am ready for the operation of this number, and here is my data."""
    READY = 3
    """I am ready; the data is too much to send along."""
    JOIN = 4
    """I have joined."""
    JOINED = 5
    """From rank 0: all have a place among those that joined, the number was the last."""
    JOIN_WISH = 6
    """To rank 0: I have no more data."""
    JOIN_PLACE = 7
    """From rank 0: you have a place; the number is 1 when it is the last. See `joins`."""
    UNIT = 8
    """To rank 0: all are ready for these large operations."""
    RELEASE = 9
    """From rank 0: begin this batch."""
    DONE = 10
    """To rank 0: the batch of that number has ended."""
    OVERDUE = 11
    """To rank 0: these operations wait, and for which ranks."""
    WHERE = 12
    """From rank 0: where is your main thread?"""
    HERE = 13
    FAIL = 14
    """It is over, for all ranks, and why."""
    LEAVE = 15
    """I leave. The number is 1 + the first rank that I saw go; 0: none has gone."""


Handler = Callable[[int, int, int, memoryview], None]
"""Takes rank, type, number and bytes of a frame; the bytes are valid during the call only."""
Events = Sequence[tuple[int, int]]
"""Descriptors, and what happened to each."""


@dataclass(eq=False, slots=True)
class PeerConnection:
    """One connection."""

    rank: int
    socket: socket.socket
    outgoing: bytearray = field(default_factory=bytearray)
    incoming: FrameBuffer = field(default_factory=lambda: FrameBuffer(LARGEST_FRAME_BYTES))
    asks_to_write: bool = False
    left: bool = False
    """It said that it leaves."""
    closed: str = ""
    """Why nothing more comes from it."""


class ControlChannel:
    """All control connections of a rank."""

    def __init__(self, connections: Sequence[Sequence[socket.socket]], handle: Handler) -> None:
        """Take one connection for each other rank, by rank; none for this one."""
        self._handle = handle
        self._sockets = select.epoll()
        """What a thread sleeps on that waits for frames."""
        self._poll = select.epoll()
        """What the control thread sleeps on: its waker, and `_sockets` unless they are lent."""
        self.by_rank: list[PeerConnection | None] = []
        self._by_descriptor: dict[int, PeerConnection] = {}
        self._unsent: set[PeerConnection] = set()
        self._room = bytearray(_READ_BYTES)
        for rank, lanes in enumerate(connections):
            link = PeerConnection(rank, lanes[0]) if lanes else None
            self.by_rank.append(link)
            if link is not None:
                self._by_descriptor[link.socket.fileno()] = link
                self._sockets.register(link.socket.fileno(), select.EPOLLIN)
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._nudger = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._sockets.register(self._nudger, select.EPOLLIN)
        self._poll.register(self._waker, select.EPOLLIN)
        self._arrivals = self._sockets.fileno()
        self._poll.register(self._arrivals, select.EPOLLIN)
        self._woken = False
        self.gone: list[PeerConnection] = []
        """Those of ranks that have left, or were lost, in the order in which that was seen."""

    def send(self, rank: int, kind: int, number: int = 0, data: bytes | bytearray | memoryview = b"") -> None:
        """Queue a frame; `flush` sends it. Ranks that are gone get nothing."""
        link = self.by_rank[rank]
        if link is None or link.closed:
            return
        link.outgoing += HEADER.pack(kind << 24 | number, len(data))
        link.outgoing += data
        self._unsent.add(link)

    @property
    def is_open(self) -> bool:
        """Whether `close` was not called."""
        return not self._poll.closed

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` has something to do."""
        return bool(self._unsent)

    def flush(self) -> None:
        """Give the kernel what it takes; the rest follows when it can."""
        for link in self._unsent:
            if not link.asks_to_write:
                self._pump_out(link)
        self._unsent.clear()

    def wake(self) -> None:
        """End `poll` in its thread."""
        if not self._woken:
            self._woken = True
            os.eventfd_write(self._waker, 1)

    def nudge(self) -> None:
        """End `poll_lent` in the thread that it is in."""
        os.eventfd_write(self._nudger, 1)

    def lend(self) -> None:
        """From now on `poll` sees `wake` alone."""
        self._poll.modify(self._arrivals, 0)

    def take_back(self) -> None:
        """From now on `poll` sees what arrives."""
        self._poll.modify(self._arrivals, select.EPOLLIN)

    def look(self) -> Events:
        """Return what there is for `serve` now."""
        return self._sockets.poll(0)

    def poll_lent(self) -> Events:
        """Sleep until something has arrived for `serve`, or until `nudge`."""
        try:
            return self._sockets.poll()
        except (OSError, ValueError):
            if self._sockets.closed:  # by a signal handler of this thread
                return []
            raise

    def poll(self, seconds: float | None) -> Events:
        """Sleep until there is something for `serve`. For the control thread.

        The caller of `wake` is probably about to queue more: it gets a moment for that.
        """
        events = self._poll.poll(seconds)
        if len(events) == 1 and events[0][0] == self._waker:
            # Others need not wake us again meanwhile, and what arrives ends it: a thread may wait for that.
            os.eventfd_read(self._waker)
            events += self._poll.poll(_COLLECT_SECONDS)
            self._woken = False
        for descriptor, _ in events:
            if descriptor == self._arrivals:
                return events + self._sockets.poll(0)
        return events

    def serve(self, events: Events) -> list[PeerConnection]:
        """Receive and send what `poll` found; return the links that were closed by it."""
        lost = []
        for descriptor, event in events:
            if descriptor == self._waker:
                if self._woken:
                    self._woken = False
                    os.eventfd_read(self._waker)
                continue
            if descriptor == self._nudger:
                with contextlib.suppress(BlockingIOError):  # another thread was quicker
                    os.eventfd_read(self._nudger)
                continue
            link = self._by_descriptor.get(descriptor)
            if link is None:
                continue
            if event & select.EPOLLOUT:
                self._pump_out(link)
            if event & ~select.EPOLLOUT and not link.closed:
                self._pump_in(link)
            if link.closed:
                lost.append(link)
        return lost

    def note_gone(self, link: PeerConnection) -> None:
        """Nothing more is to be expected from this rank."""
        if link not in self.gone:
            self.gone.append(link)

    def leave(self, seconds: float) -> None:
        """Say that this rank leaves, send what is queued, and close; for at most `seconds`.

        Each peer hangs up when it has heard it: a connection that is closed with bytes unread would take back what
        the peer has not read yet.
        """
        deadline = time.monotonic() + seconds
        first = 1 + self.gone[0].rank if self.gone else 0
        for link in self._by_descriptor.values():
            self.send(link.rank, Frame.LEAVE, first)
        self.flush()
        while (left := deadline - time.monotonic()) > 0:
            for link in self._by_descriptor.values():
                if not link.outgoing and not link.closed and not link.left:
                    self._end_writing(link)
            if all(link.closed for link in self._by_descriptor.values()):
                break
            self.serve(self._sockets.poll(left))
        self.close()

    def hang_up(self, link: PeerConnection) -> None:
        """Close our side too, after the peer has left."""
        link.outgoing.clear()
        self._drop(link, link.closed or "it left")
        link.socket.close()

    def close(self) -> None:
        """Close everything at once."""
        for link in self._by_descriptor.values():
            link.socket.close()
        self._by_descriptor.clear()
        self._unsent.clear()
        if not self._poll.closed:
            self._poll.close()
            self._sockets.close()
            os.close(self._waker)
            os.close(self._nudger)

    def _end_writing(self, link: PeerConnection) -> None:
        try:
            link.socket.shutdown(socket.SHUT_WR)
        except OSError as problem:
            self._drop(link, str(problem))
        link.left = True

    def _pump_out(self, link: PeerConnection) -> None:
        if link.closed:
            return
        try:
            sent = link.socket.send(link.outgoing) if link.outgoing else 0
            del link.outgoing[:sent]
        except BlockingIOError:
            pass
        except OSError:
            return  # what it said before it went is still to be read; reading finds the end
        wants = bool(link.outgoing)
        if wants != link.asks_to_write:
            link.asks_to_write = wants
            self._sockets.modify(link.socket.fileno(), select.EPOLLIN | (select.EPOLLOUT if wants else 0))

    def _pump_in(self, link: PeerConnection) -> None:
        room = memoryview(self._room)
        try:
            while True:
                count = link.socket.recv_into(self._room)
                if count == 0:
                    self._drop(link, "it closed its connection")
                    return
                for word, payload in link.incoming.feed(room[:count]):
                    self._handle(link.rank, word >> 24, word & NUMBER_MASK, payload)
                if count < _READ_BYTES:
                    return  # edge or not, epoll tells us when there is more
        except BlockingIOError:
            return
        except (OSError, FrameError) as problem:
            self._drop(link, str(problem))

    def _drop(self, link: PeerConnection, reason: str) -> None:
        if link.closed:
            return
        link.closed = reason
        self.note_gone(link)
        self._sockets.unregister(link.socket.fileno())
        self._unsent.discard(link)
