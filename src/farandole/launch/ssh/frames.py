"""Framed messages over the two pipes of a host: a kind, a length with a bound, then JSON or bytes.

Neither end waits for the other: what cannot be written yet is kept. `send` may be called from two threads.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from typing import Any

from ...core.framing import FrameBuffer, FrameError, pack_frame, pack_json
from ...core.vocabulary.errors import LaunchError
from ..supervise.stopped_process import FailureDetector

MOST_BYTES = 1 << 20
"""Largest frame. A longer one does not come from a farandole."""
OUTAGE_SECONDS = 2.0
"""Longest outage of the network that a job survives."""
SILENCE_SECONDS = 2 * OUTAGE_SECONDS
"""After which the other end is taken for dead. See [Note: an outage is longer than it was].

[Note: an outage is longer than it was] TCP sends again what was lost after 0.2 s, then after twice as long each
time: 0.2, 0.6, 1.4 and 3.0 s after the first loss, so a network that was away for 2 s is silent for more than
3 s. More beats do not help: they wait behind the lost one. Twice the outage is never too little.
"""
MAGIC = b"\nfarandole agent 1\n"
"""Comes before the first frame of an agent; what the host's shell printed before it is no frame."""
MOST_NOISE_BYTES = 1 << 16
MESSAGE, OUTPUT, FILE, BEAT = b"m", b"o", b"f", b"b"
_TAGS = tuple(map(ord, (MESSAGE, OUTPUT, FILE, BEAT)))
_OUTPUT = struct.Struct("!IB")

Message = dict[str, Any]


class Channel:
    """One end: reads frames from one descriptor, writes them to another. Both are made non-blocking."""

    def __init__(self, read_end: int, write_end: int, *, expect_magic: bool = False) -> None:
        self.read_end, self.write_end = read_end, write_end
        for descriptor in (read_end, write_end):
            os.set_blocking(descriptor, False)
        self.ended = False
        """Nothing more will come."""
        self.broken = False
        """Nothing more can be sent."""
        self.patience = FailureDetector(SILENCE_SECONDS, time.monotonic())
        """When anything came, and how long to wait for more."""
        self._expects_magic = expect_magic
        self._noise = b""
        """What came before the magic line."""
        self._frames = FrameBuffer(MOST_BYTES)
        self._outgoing = bytearray()
        self._lock = threading.Lock()

    @property
    def waiting_bytes(self) -> int:
        """Bytes that could not be written yet."""
        return len(self._outgoing)

    def send_message(self, message: Message) -> None:
        """Send JSON."""
        self.send(MESSAGE, pack_json(message))

    def send_output(self, rank: int, is_error: bool, data: bytes) -> None:
        """Send what a rank printed."""
        self.send(OUTPUT, _OUTPUT.pack(rank, is_error) + data)

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        """Send a frame; raise `LaunchError` when it is larger than the other end would take."""
        if len(payload) > MOST_BYTES:
            raise LaunchError(f"a message of {len(payload)} bytes to a host: expected at most {MOST_BYTES}")
        with self._lock:
            if not self.broken:
                self._outgoing += pack_frame(ord(kind), payload, MOST_BYTES)
                self._write()

    def send_raw(self, data: bytes) -> None:
        """Send bytes outside any frame, before the first one."""
        with self._lock:
            self._outgoing += data
            self._write()

    def flush(self) -> None:
        """Write what the pipe takes now."""
        with self._lock:
            if not self.broken:
                self._write()

    def receive(self) -> list[tuple[bytes, bytes]]:
        """Return the frames that are complete; raise `FrameError` for anything else. Never waits."""
        arrived = bytearray()
        try:
            while len(arrived) <= 2 * MOST_BYTES:
                piece = os.read(self.read_end, 1 << 16)
                if not piece:
                    self.ended = True
                    break
                arrived += piece
                self.patience.heard(time.monotonic())
        except BlockingIOError:
            pass
        except OSError:
            self.ended = True
        data = self._without_noise(bytes(arrived)) if self._expects_magic else bytes(arrived)
        frames = []
        for tag, payload in self._frames.feed(data):
            if tag not in _TAGS:
                raise FrameError(f"frame of kind {tag}: expected one of {', '.join(map(str, _TAGS))}")
            frames.append((bytes([tag]), bytes(payload)))
        return frames

    def close(self) -> None:
        """Write no more, from any thread: the descriptors are about to be closed by their owner."""
        with self._lock:
            self.broken = True
            self._outgoing.clear()

    def _without_noise(self, data: bytes) -> bytes:
        """Return what came after the magic line: nothing, as long as that line did not come."""
        noise, found, rest = (self._noise + data).partition(MAGIC)
        if found:
            self._expects_magic = False
            return rest
        if len(noise) > MOST_NOISE_BYTES:
            raise FrameError(f"its shell printed more than {MOST_NOISE_BYTES} bytes before anything was started")
        self._noise = noise
        return b""

    def _write(self) -> None:
        try:
            while self._outgoing:
                written = os.write(self.write_end, bytes(self._outgoing[: 1 << 16]))
                del self._outgoing[:written]
        except BlockingIOError:
            pass
        except OSError:
            self.broken = True
            self._outgoing.clear()


def pipe_of_this_process() -> Channel:
    """Return the channel to who started us, over stdin and stdout; what is printed from now on goes to stderr."""
    read_end, write_end = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    channel = Channel(read_end, write_end)
    channel.send_raw(MAGIC)
    return channel


def read_output(payload: bytes) -> tuple[int, bool, bytes]:
    """Return rank, whether it is stderr, and the bytes."""
    if len(payload) < _OUTPUT.size:
        raise FrameError(f"output of {len(payload)} bytes: expected at least {_OUTPUT.size}")
    rank, is_error = _OUTPUT.unpack_from(payload)
    return rank, bool(is_error), payload[_OUTPUT.size :]
