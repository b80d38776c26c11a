"""One connection of a transport: its send queue, and the frame that is being received.

A frame is a tag, a length and bytes. One call sends several of them, and SO_RCVLOWAT lets the kernel collect a
frame before it wakes us.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ...core.wire.framing import HEADER

_COLLECT_BYTES = 128 * 1024
"""The kernel wakes us for this many bytes, or the end of the frame."""
_SMALL_BYTES = 4096
_VIEWS_A_CALL = 16


@dataclass(eq=False, slots=True)
class Connection:
    """A connection to `rank`, whose socket never blocks."""

    rank: int
    socket: socket.socket
    tag: int = -1
    """Tag of the frame that is being received, or was last."""
    is_early: bool = False
    """Early frame: no receive was posted when it began, so it is buffered."""
    lost: str = ""
    """Why nothing travels over it any more; empty: it does."""
    asks_to_write: bool = False
    """Whether the kernel is asked to tell when it takes more."""
    _outgoing: deque[memoryview] = field(default_factory=deque)
    _header: bytearray = field(default_factory=lambda: bytearray(HEADER.size))
    _header_filled: int = 0
    _target: memoryview | None = None
    _filled: int = 0
    _wakes_at_bytes: int = 1

    @property
    def has_more_to_send(self) -> bool:
        """Whether something is queued that the kernel has not taken yet."""
        return bool(self._outgoing)

    def queue(self, tag: int, frame: memoryview) -> None:
        """Have a frame sent after all that is queued."""
        self._outgoing.append(memoryview(HEADER.pack(tag, len(frame))))
        self._outgoing.append(frame)

    def drop_queue(self) -> None:
        """Send nothing of what is queued."""
        self._outgoing.clear()

    def drop_frames_not_begun(self) -> None:
        """Leave what ends the frame of which a part was sent. Headers and contents alternate in the queue."""
        queued = self._outgoing
        is_header_begun = len(queued) % 2 == 0 and len(queued) > 0 and len(queued[0]) < HEADER.size
        begun = 2 if is_header_begun else len(queued) % 2
        while len(queued) > begun:
            queued.pop()

    def send_what_fits(self) -> int:
        """Give the kernel what it takes; return how many bytes. Raises `OSError` when the connection is lost."""
        queue, moved = self._outgoing, 0
        try:
            while queue:
                sent = self.socket.sendmsg([queue[i] for i in range(min(_VIEWS_A_CALL, len(queue)))])
                moved += sent
                while queue and sent >= len(queue[0]):  # an empty one goes with what is before it
                    sent -= len(queue.popleft())
                if sent:
                    queue[0] = queue[0][sent:]
        except BlockingIOError:
            pass
        return moved

    def receive_what_is_there(self, begin: Callable[[int], memoryview], end: Callable[[memoryview], bool]) -> int:
        """Take what the kernel has; return how many bytes. Raises `OSError` when the connection is lost.

        When a frame begins, `begin` is given its length and returns where to put it; `tag` says whose it is. When
        it is there, `end` is given it and says whether to go on.
        """
        moved = 0
        try:
            while True:
                if self._target is None:
                    count = self.socket.recv_into(memoryview(self._header)[self._header_filled :])
                    self._header_filled += count
                    if count and self._header_filled == HEADER.size:
                        self._header_filled = self._filled = 0
                        self.tag, length = HEADER.unpack(self._header)
                        self._target = begin(length)
                else:
                    count = self.socket.recv_into(self._target[self._filled :])
                    self._filled += count
                moved += count
                if count == 0:
                    raise ConnectionResetError("it closed its connection")
                if self._target is not None and self._filled == len(self._target):
                    frame, self._target = self._target, None
                    self._collect(1)
                    if not end(frame):
                        return moved
        except BlockingIOError:
            if self._target is not None:
                self._collect(min(_COLLECT_BYTES, len(self._target) - self._filled))
        return moved

    def _collect(self, wanted: int) -> None:
        """Have the kernel wake us only when `wanted` bytes are there; small frames are not worth the call."""
        wanted = wanted if wanted > _SMALL_BYTES else 1
        if wanted != self._wakes_at_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
            self._wakes_at_bytes = wanted
