"""Incoming connections while ranks connect: all are served at once, each for a bounded time.

A caller that sends nothing (a port scanner, a health check) delays no rank, and is disconnected after a while.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

PATIENCE_SECONDS = 5.0
"""Time a peer has to identify itself."""
MOST_CALLERS = 512
"""That have not said it yet: of more, the one that called first is hung up on."""


@dataclass(eq=False)
class _Caller:
    connection: socket.socket
    until_seconds: float
    heard: bytearray = field(default_factory=bytearray)


class Callers:
    """Accepts calls on a listener and hears a hello of fixed length from each."""

    def __init__(self, listener: socket.socket, hello_bytes: int) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._hello_bytes = hello_bytes
        self._pending: dict[socket.socket, _Caller] = {}
        self._selector = selectors.EpollSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    @property
    def descriptor(self) -> int:
        """Readable when there is something to hear."""
        return self._selector.fileno()

    @property
    def has_pending(self) -> bool:
        """Whether a caller has not said its hello yet."""
        return bool(self._pending)

    def hear(self, seconds: float) -> list[tuple[bytes, socket.socket]]:
        """Wait for at most `seconds`; return hellos that are complete, with their connections, the caller's now.

        Raises `OSError` when the listener cannot accept any more.
        """
        complete: list[tuple[bytes, socket.socket]] = []
        for key, _ in self._selector.select(max(0.0, seconds)):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj in self._pending:
                complete += self._listen(self._pending[key.fileobj])
        now = time.monotonic()
        for caller in [each for each in self._pending.values() if each.until_seconds < now]:
            self._hang_up(caller)
        return complete

    def close(self) -> None:
        """Hang up on all that have not said their hello."""
        for caller in list(self._pending.values()):
            self._hang_up(caller)
        self._selector.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):  # all are in, or it hung up before we answered
                return
            connection.setblocking(False)
            if len(self._pending) >= MOST_CALLERS:
                self._hang_up(next(iter(self._pending.values())))
            self._pending[connection] = _Caller(connection, time.monotonic() + PATIENCE_SECONDS)
            self._selector.register(connection, selectors.EVENT_READ)

    def _listen(self, caller: _Caller) -> Sequence[tuple[bytes, socket.socket]]:
        try:
            part = caller.connection.recv(self._hello_bytes - len(caller.heard))
        except BlockingIOError:
            return ()
        except OSError:
            part = b""
        if not part:
            self._hang_up(caller)
            return ()
        caller.heard += part
        if len(caller.heard) < self._hello_bytes:
            return ()
        self._forget(caller)
        return ((bytes(caller.heard), caller.connection),)

    def _forget(self, caller: _Caller) -> None:
        self._selector.unregister(caller.connection)
        del self._pending[caller.connection]

    def _hang_up(self, caller: _Caller) -> None:
        self._forget(caller)
        caller.connection.close()
