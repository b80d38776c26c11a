"""Framed messages over the two pipes of a host: a kind, a length with a bound, then JSON or bytes.

Neither end waits for the other: what cannot be written yet is kept. `send` may be called from two threads.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import time
from typing import Any

from ....core.vocabulary.errors import LaunchError
from ...supervise.failure_detector import FailureDetector

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
_KINDS = (MESSAGE, OUTPUT, FILE, BEAT)
_HEADER = struct.Struct("!cI")
_OUTPUT = struct.Struct("!IB")

Message = dict[str, Any]


class BadFrame(LaunchError):
    """What came is no frame of ours."""


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
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._lock = threading.Lock()

    @property
    def waiting_bytes(self) -> int:
        """Bytes that could not be written yet."""
        return len(self._outgoing)

    def send_message(self, message: Message) -> None:
        """Send JSON."""
        self.send(MESSAGE, json.dumps(message).encode())

    def send_output(self, rank: int, is_error: bool, data: bytes) -> None:
        """Send what a rank printed."""
        self.send(OUTPUT, _OUTPUT.pack(rank, is_error) + data)

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        """Send a frame; raise `LaunchError` when it is larger than the other end would take."""
        if len(payload) > MOST_BYTES:
            raise LaunchError(f"a message of {len(payload)} bytes to a host: expected at most {MOST_BYTES}")
        with self._lock:
            if not self.broken:
                self._outgoing += _HEADER.pack(kind, len(payload)) + payload
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
        """Return the frames that are complete; raise `BadFrame` for anything else. Never waits."""
        try:
            while len(self._incoming) <= 2 * MOST_BYTES:
                piece = os.read(self.read_end, 1 << 16)
                if not piece:
                    self.ended = True
                    break
                self._incoming += piece
                self.patience.heard(time.monotonic())
        except BlockingIOError:
            pass
        except OSError:
            self.ended = True
        if self._expects_magic and not self._skip_noise():
            return []
        frames = []
        position = 0
        while len(self._incoming) - position >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._incoming, position)
            if kind not in _KINDS or length > MOST_BYTES:
                raise BadFrame(f"frame of kind {kind!r} and {length} bytes: expected at most {MOST_BYTES}")
            begin = position + _HEADER.size
            if len(self._incoming) - begin < length:
                break
            position = begin + length
            frames.append((kind, bytes(self._incoming[begin:position])))
        del self._incoming[:position]
        return frames

    def close(self) -> None:
        """Write no more, from any thread: the descriptors are about to be closed by their owner."""
        with self._lock:
            self.broken = True
            self._outgoing.clear()

    def _skip_noise(self) -> bool:
        found = self._incoming.find(MAGIC)
        if found >= 0:
            del self._incoming[: found + len(MAGIC)]
            self._expects_magic = False
            return True
        if len(self._incoming) > MOST_NOISE_BYTES:
            raise BadFrame(f"its shell printed more than {MOST_NOISE_BYTES} bytes before anything was started")
        return False

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


def read_message(payload: bytes) -> Message:
    """Return the message of a frame; raise `BadFrame` when it is none."""
    try:
        message = json.loads(payload)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise BadFrame(f"message {payload[:80]!r}: expected a JSON object with a type")
    return message


def read_output(payload: bytes) -> tuple[int, bool, bytes]:
    """Return rank, whether it is stderr, and the bytes."""
    if len(payload) < _OUTPUT.size:
        raise BadFrame(f"output of {len(payload)} bytes: expected at least {_OUTPUT.size}")
    rank, is_error = _OUTPUT.unpack_from(payload)
    return rank, bool(is_error), payload[_OUTPUT.size :]
