"""The worker's end of the control channel: one connection, one thread that listens."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from ...core.environ.env import ElasticSettings
from ...core.vocabulary.errors import LaunchError
from ...core.wire.framing import FrameError
from ...launch.elastic.control import (
    NONCE_BYTES,
    Frame,
    frame_signer,
    frame_verifier,
    make_hello,
    make_nonce,
    session_keys,
    sign,
    verify,
)

_CONNECT_SECONDS = 30.0


class ControlConnection:
    """Frames to and from the launcher. `handle` is called in the listening thread, with None at the end."""

    def __init__(self, settings: ElasticSettings, handle: Callable[[Frame | None], None]) -> None:
        """Call the launcher; raise `LaunchError` when it does not answer, or is not the one that started us."""
        self._handle = handle
        where = f"{settings.address}:{settings.port}"
        try:
            self._socket = socket.create_connection((settings.address, settings.port), _CONNECT_SECONDS)
        except OSError as problem:
            raise LaunchError(f"the launcher at {where} does not answer: {problem}") from None
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            theirs = self._receive_exactly(NONCE_BYTES)
            mine = make_nonce()
            self._socket.sendall(make_hello(settings.key, settings.worker, theirs, mine))
            up, down = session_keys(settings.key, theirs, mine)
            self._signer, self._verifier = frame_signer(up), frame_verifier(down)
            first = self._first_frames()
        except (OSError, FrameError) as problem:
            self._socket.close()
            raise LaunchError(f"the launcher at {where} is not ours: {problem or 'it hung up'}") from None
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._listen, args=(first,), name="farandole launcher", daemon=True)
        self._thread.start()

    def send(self, frame: Frame) -> None:
        """Send a frame; a launcher that is gone is noticed by the listening thread."""
        with self._lock, suppress(OSError):
            self._socket.sendall(sign(self._signer, frame))

    def forget(self) -> None:
        """In a forked child: close our copy; the connection itself is the parent's."""
        self._closed = True
        self._socket.close()

    def close(self) -> None:
        """Hang up, and wait for the thread (unless it is the one that calls)."""
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)
        self._socket.close()

    def _first_frames(self) -> list[Frame]:
        deadline = time.monotonic() + _CONNECT_SECONDS
        while not (frames := verify(self._verifier, self._receive_some())):
            if time.monotonic() > deadline:
                raise OSError("it sent no welcome")
        self._socket.settimeout(None)
        return frames

    def _receive_some(self) -> bytes:
        data = self._socket.recv(1 << 16)
        if not data:
            raise OSError("it hung up")
        return data

    def _receive_exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self._socket.recv(count - len(data))
            if not piece:
                raise OSError("it hung up")
            data += piece
        return data

    def _listen(self, frames: list[Frame]) -> None:
        try:
            while True:
                for frame in frames:
                    self._handle(frame)
                frames = verify(self._verifier, self._receive_some())
        except (OSError, FrameError):
            if not self._closed:
                self._handle(None)
