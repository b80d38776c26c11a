"""The frames between launcher and workers of an elastic job. Bytes in, bytes out: no socket here.

[Note: the control channel] Both sides hold a secret key: the launcher makes one for each
worker from the job's secret and passes it on in the environment, never on a command line. A connection begins
with a random number from either side; from these and the worker's key come the session's two keys, one for each
direction. Every frame carries a HMAC of its number and its text, so that a frame which was changed, left
out, repeated, sent back or kept from another connection is refused, and with it the connection. Lengths
are bounded before anything is kept. Texts are JSON objects; nothing that comes from the network is executed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import struct
from dataclasses import dataclass, field
from typing import Any

from ...core.vocabulary.errors import FarandoleError

Frame = dict[str, Any]
LONGEST_FRAME_BYTES = 64 * 1024
NONCE_BYTES = 16
_MAC_BYTES = 32
_MAGIC = b"FRDE"
_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")
_HELLO = struct.Struct(f">4sI{NONCE_BYTES}s{_MAC_BYTES}s")
HELLO_BYTES = _HELLO.size


class BadFrame(FarandoleError):
    """Bytes on a control channel that its peer cannot have sent."""


def make_secret() -> bytes:
    """Return a new secret for a job."""
    return secrets.token_bytes(32)


def make_nonce() -> bytes:
    """Return the random number that begins a connection."""
    return secrets.token_bytes(NONCE_BYTES)


def worker_key(secret: bytes, worker: int) -> bytes:
    """Return the key of one worker, from which neither the secret nor another worker's key can be had."""
    return _mac(secret, b"worker", _NUMBER.pack(worker))


@dataclass(eq=False)
class FrameSigner:
    """Turns what is said in one direction into frames."""

    key: bytes
    _count: int = 0

    def seal(self, frame: Frame) -> bytes:
        """Return the next frame; raise `ValueError` when it is longer than a frame may be."""
        text = json.dumps(frame, separators=(",", ":")).encode()
        if len(text) + _MAC_BYTES > LONGEST_FRAME_BYTES:
            raise ValueError(f"a frame of {len(text)} bytes, at most {LONGEST_FRAME_BYTES - _MAC_BYTES} are sent")
        mac = _mac(self.key, _NUMBER.pack(self._count), text)
        self._count += 1
        return _LENGTH.pack(len(text) + _MAC_BYTES) + mac + text


@dataclass(eq=False)
class FrameVerifier:
    """Takes bytes of one direction, in pieces as they come, and gives the frames in them."""

    key: bytes
    _count: int = 0
    _bytes: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that are complete now; raise `BadFrame` for the first that is not to be trusted."""
        self._bytes += data
        found = []
        while (frame := self._next()) is not None:
            found.append(frame)
        return found

    def _next(self) -> Frame | None:
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        if not _MAC_BYTES < length <= LONGEST_FRAME_BYTES:
            raise BadFrame(f"a frame of {length} bytes, expected {_MAC_BYTES + 1} to {LONGEST_FRAME_BYTES}")
        if len(self._bytes) < _LENGTH.size + length:
            return None
        body = bytes(self._bytes[_LENGTH.size : _LENGTH.size + length])
        del self._bytes[: _LENGTH.size + length]
        mac, text = body[:_MAC_BYTES], body[_MAC_BYTES:]
        if not hmac.compare_digest(mac, _mac(self.key, _NUMBER.pack(self._count), text)):
            raise BadFrame(f"frame {self._count} is not from our peer, or not the one that comes next")
        self._count += 1
        try:
            frame = json.loads(text)
        except (ValueError, RecursionError):
            raise BadFrame("a frame that is not JSON") from None
        if not isinstance(frame, dict) or not isinstance(frame.get("type"), str):
            raise BadFrame("a frame without a type")
        return frame


def make_hello(key: bytes, worker: int, theirs: bytes, mine: bytes) -> bytes:
    """Return what a worker answers to the launcher's nonce `theirs`, with a nonce of its own."""
    return _HELLO.pack(_MAGIC, worker, mine, _mac(key, b"hello", theirs, mine, _NUMBER.pack(worker)))


def read_hello(secret: bytes, hello: bytes, mine: bytes) -> tuple[int, bytes]:
    """Return the number and nonce of the worker that answered to our nonce `mine`; raise `BadFrame` for others."""
    magic, worker, theirs, mac = _HELLO.unpack(hello)
    expected = _mac(worker_key(secret, worker), b"hello", mine, theirs, _NUMBER.pack(worker))
    if magic != _MAGIC or not hmac.compare_digest(mac, expected):
        raise BadFrame("a caller that is no worker of this job")
    return worker, theirs


def session_keys(key: bytes, launcher_nonce: bytes, worker_nonce: bytes) -> tuple[bytes, bytes]:
    """Return the keys of frames to the launcher and of frames to the worker."""
    return tuple(_mac(key, way, launcher_nonce, worker_nonce) for way in (b"up", b"down"))  # type: ignore[return-value]


def _mac(key: bytes, *parts: bytes) -> bytes:
    # The lengths go in too: no two lists of parts may look alike.
    digest = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        digest.update(_NUMBER.pack(len(part)))
        digest.update(part)
    return digest.digest()
