"""Frames: how messages are told apart in a stream of bytes. Bytes in, bytes out: no socket, no pipe, no thread.

A frame is a tag and a length, eight bytes each, and then that many bytes. What the tag means is its protocol's
affair: the kind of a message, the number of an operation, a counter.

Every length is compared with a bound before anything is kept: a stream that is damaged, or not ours, is a
`FrameError`, never a large allocation. A stream that gave one is of no further use: where the next frame begins
is unknown.

[Note: signed frames] Where an address is reachable by others, each direction of a connection has a key of its own,
and a frame carries a HMAC of its number in that direction and of its bytes. So a frame that was changed, left out,
repeated, reordered, sent back or recorded on another connection is refused. The keys must be fresh for each
connection; agreeing on them is the protocol's affair.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from dataclasses import dataclass, field
from typing import Any

from .vocabulary.errors import FarandoleError

HEADER = struct.Struct("<QQ")
"""Tag and length in bytes."""
MAC_BYTES = 32


class FrameError(FarandoleError):
    """Bytes that a peer of ours cannot have sent."""


def pack_frame(tag: int, payload: bytes | bytearray | memoryview, most_bytes: int) -> bytes:
    """Return the frame of `payload`; raise `FrameError` if the other end, with the same bound, would refuse it."""
    if len(payload) > most_bytes:
        raise FrameError(f"a frame of {len(payload)} bytes: expected at most {most_bytes}")
    return HEADER.pack(tag, len(payload)) + payload


@dataclass(eq=False, slots=True)
class FrameBuffer:
    """One direction of a stream, at its receiver: takes bytes in pieces as they come, gives complete frames."""

    most_bytes: int
    """The longest payload."""
    _incomplete: bytearray = field(default_factory=bytearray)
    """The beginning of the next frame."""

    @property
    def waiting_bytes(self) -> int:
        """Bytes that were taken and belong to a frame that is not complete."""
        return len(self._incomplete)

    def feed(self, data: bytes | bytearray | memoryview) -> list[tuple[int, memoryview]]:
        """Return tag and payload of all frames that are complete with `data`; raise `FrameError` for a bad length.

        A payload may be a view of `data`: it is valid until `data` changes.
        """
        if self._incomplete:
            self._incomplete += data
            stream: bytes | bytearray | memoryview = self._incomplete
        else:
            stream = data
        frames = []
        view, end, begin = memoryview(stream), len(stream), 0
        while begin + HEADER.size <= end:
            tag, length = HEADER.unpack_from(view, begin)
            if length > self.most_bytes:
                raise FrameError(f"a frame of {length} bytes: expected at most {self.most_bytes}")
            payload = begin + HEADER.size
            if payload + length > end:
                break
            begin = payload + length
            frames.append((tag, view[payload:begin]))
        if begin or stream is data:  # else all of it waits, where it is
            self._incomplete = bytearray(view[begin:])
        return frames


@dataclass(eq=False, slots=True)
class StreamSigner:
    """One direction of a signed stream, at its sender. See [Note: signed frames]."""

    key: bytes
    most_bytes: int
    """The longest payload."""
    _count: int = 0

    def sign(self, payload: bytes) -> bytes:
        """Return the next frame; raise `FrameError`, and count none, if it is longer than a frame may be."""
        body = _mac_of_frame(self.key, self._count, payload) + payload
        frame = pack_frame(self._count, body, self.most_bytes + MAC_BYTES)
        self._count += 1
        return frame


@dataclass(eq=False, slots=True)
class StreamVerifier:
    """One direction of a signed stream, at its receiver. See [Note: signed frames]."""

    key: bytes
    most_bytes: int
    """The longest payload."""
    _count: int = 0
    _frames: FrameBuffer = field(init=False)

    def __post_init__(self) -> None:
        self._frames = FrameBuffer(self.most_bytes + MAC_BYTES)

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads that are complete with `data`; raise `FrameError` for one not to be trusted."""
        payloads = []
        for tag, body in self._frames.feed(data):
            mac, payload = bytes(body[:MAC_BYTES]), bytes(body[MAC_BYTES:])
            expected = _mac_of_frame(self.key, self._count, payload)
            if tag != self._count or not hmac.compare_digest(mac, expected):
                raise FrameError(f"frame {self._count} is not from our peer, or not the one that comes next")
            self._count += 1
            payloads.append(payload)
        return payloads


def keyed_hash(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC-SHA256 of a list of byte strings. Lengths are part of it: no two lists look alike."""
    digest = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def pack_json(message: dict[str, Any]) -> bytes:
    """Return the text of a JSON message, which says its ``type``."""
    return json.dumps(message, separators=(",", ":")).encode()


def read_json(payload: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Return a message from its text; raise `FrameError` unless it is a JSON object with a ``type``."""
    text = bytes(payload)
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise FrameError(f"message {text[:80]!r}: expected a JSON object with a type")
    return message


def _mac_of_frame(key: bytes, count: int, payload: bytes) -> bytes:
    return keyed_hash(key, HEADER.pack(count, len(payload)), payload)
