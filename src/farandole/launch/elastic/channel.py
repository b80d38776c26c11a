"""The launcher's end of the control channels: a listener, and a connection for each worker that called."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from ...core.wire.framing import FrameError, StreamSigner, StreamVerifier
from .control import (
    HELLO_BYTES,
    Frame,
    frame_signer,
    frame_verifier,
    make_nonce,
    read_hello,
    session_keys,
    sign,
    verify,
    worker_key,
)

HELLO_SECONDS = 5.0
"""For a caller to say who it is."""
_MOST_STRANGERS = 64
_MOST_UNSENT_BYTES = 1 << 20


@dataclass(eq=False)
class WorkerChannel:
    """One connection. Nameless until its hello has been read."""

    socket: socket.socket
    nonce: bytes
    since: float
    worker: int | None = None
    _hello: bytearray = field(default_factory=bytearray)
    _signer: StreamSigner | None = None
    _verifier: StreamVerifier | None = None
    _unsent: bytearray = field(default_factory=bytearray)

    def send(self, frame: Frame) -> None:
        """Queue a frame and send what the kernel takes; the rest goes with later calls of `flush`."""
        if self._signer is None:
            return
        self._unsent += sign(self._signer, frame)
        self.flush()

    def flush(self) -> None:
        """Send what is queued. Ignores a peer that is gone: the reading side detects it."""
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            if len(self._unsent) > _MOST_UNSENT_BYTES:
                self._unsent.clear()
                self.socket.shutdown(socket.SHUT_RDWR)  # it does not read: the next look finds the end
        except OSError:
            self._unsent.clear()

    def receive(self, secret: bytes) -> list[Frame] | None:
        """Return the frames that came; None at the end. Raises `FrameError`."""
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        if self._verifier is None:
            missing = HELLO_BYTES - len(self._hello)
            self._hello += data[:missing]
            data = data[missing:]
            if len(self._hello) < HELLO_BYTES:
                return []
            self.worker, theirs = read_hello(secret, bytes(self._hello), self.nonce)
            up, down = session_keys(worker_key(secret, self.worker), self.nonce, theirs)
            self._verifier, self._signer = frame_verifier(up), frame_signer(down)
            self.send({"type": "welcome"})
        return verify(self._verifier, data)


class Switchboard:
    """Accepts connections and passes on frames, inside the selector loop of its caller."""

    def __init__(self, address: str, secret: bytes, selector: selectors.BaseSelector) -> None:
        self.secret = secret
        self._selector = selector
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind((address, 0))
        self._listener.listen(128)
        self._listener.setblocking(False)
        self.address, self.port = address, int(self._listener.getsockname()[1])
        self.channels: dict[int, WorkerChannel] = {}
        """By worker."""
        self._strangers: set[WorkerChannel] = set()
        selector.register(self._listener, selectors.EVENT_READ, self)

    def accept(self, now: float) -> None:
        """Take a call."""
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self._strangers) >= _MOST_STRANGERS:
            connection.close()
            return
        channel = WorkerChannel(connection, make_nonce(), now)
        try:
            connection.send(channel.nonce)
        except OSError:
            connection.close()
            return
        self._strangers.add(channel)
        self._selector.register(connection, selectors.EVENT_READ, channel)

    def read(self, channel: WorkerChannel, known: Callable[[int], bool]) -> list[Frame]:
        """Return what came on a channel; hang up at its end, on bad frames and on those not `known`."""
        try:
            frames = channel.receive(self.secret)
        except FrameError:
            frames = None
        if channel in self._strangers and channel.worker is not None:
            # Each worker connects once, so a second connection is not from it.
            if not known(channel.worker) or channel.worker in self.channels:
                channel.worker, frames = None, None
            else:
                self._strangers.discard(channel)
                self.channels[channel.worker] = channel
        if frames is None:
            self.hang_up(channel)
            return []
        return frames

    def send(self, worker: int, frame: Frame) -> None:
        """Send to a worker, if it has called."""
        if worker in self.channels:
            self.channels[worker].send(frame)

    def tick(self, now: float) -> None:
        """Send what waits; hang up on strangers that said nothing for long."""
        for channel in list(self.channels.values()):
            channel.flush()
        for channel in [each for each in self._strangers if now - each.since > HELLO_SECONDS]:
            self.hang_up(channel)

    def hang_up(self, channel: WorkerChannel) -> None:
        """Close a connection."""
        self._strangers.discard(channel)
        if channel.worker is not None and self.channels.get(channel.worker) is channel:
            del self.channels[channel.worker]
        if channel.socket in self._selector.get_map():
            self._selector.unregister(channel.socket)
        channel.socket.close()

    def close(self) -> None:
        """Close everything."""
        for channel in [*self._strangers, *self.channels.values()]:
            self.hang_up(channel)
        if self._listener in self._selector.get_map():
            self._selector.unregister(self._listener)
        self._listener.close()
