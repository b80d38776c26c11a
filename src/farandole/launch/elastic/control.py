"""The frames between launcher and workers of an elastic job. Bytes in, bytes out: no socket here.

[Note: the control channel] Both sides hold a secret key: the launcher makes one for each
worker from the job's secret and passes it on in the environment, never on a command line. A connection begins
with a random number from either side; from these and the worker's key come the session's two keys, one for each
direction. Every frame carries a HMAC of its number and its text, so that a frame which was changed, left
out, repeated, sent back or kept from another connection is refused, and with it the connection. Lengths
are bounded before anything is kept. Texts are JSON objects; nothing that comes from the network is executed.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from typing import Any

from ...core.framing import (
    MAC_BYTES,
    FrameError,
    StreamSigner,
    StreamVerifier,
    keyed_hash,
    pack_json,
    read_json,
)

Frame = dict[str, Any]
LONGEST_FRAME_BYTES = 64 * 1024
NONCE_BYTES = 16
NO_STATE = -1
"""Progress of a worker that has not yet received the job's state."""
_MAGIC = b"FRDE"
_NUMBER = struct.Struct(">Q")
_HELLO = struct.Struct(f">4sI{NONCE_BYTES}s{MAC_BYTES}s")
HELLO_BYTES = _HELLO.size


def make_secret() -> bytes:
    """Return a new secret for a job."""
    return secrets.token_bytes(32)


def make_nonce() -> bytes:
    """Return the random number that begins a connection."""
    return secrets.token_bytes(NONCE_BYTES)


def worker_key(secret: bytes, worker: int) -> bytes:
    """Return the key of one worker, from which neither the secret nor another worker's key can be had."""
    return keyed_hash(secret, b"worker", _NUMBER.pack(worker))


def frame_signer(key: bytes) -> StreamSigner:
    """Return what makes frames of messages in one direction."""
    return StreamSigner(key, LONGEST_FRAME_BYTES)


def frame_verifier(key: bytes) -> StreamVerifier:
    """Return what takes the bytes of one direction, in pieces as they come."""
    return StreamVerifier(key, LONGEST_FRAME_BYTES)


def sign(signer: StreamSigner, frame: Frame) -> bytes:
    """Return the bytes of the next frame; raise `FrameError` when it is longer than a frame may be."""
    return signer.sign(pack_json(frame))


def verify(verifier: StreamVerifier, data: bytes) -> list[Frame]:
    """Return the frames that are complete with `data`; raise `FrameError` for the first not to be trusted."""
    return [read_json(payload) for payload in verifier.feed(data)]


def make_hello(key: bytes, worker: int, theirs: bytes, mine: bytes) -> bytes:
    """Return what a worker answers to the launcher's nonce `theirs`, with a nonce of its own."""
    return _HELLO.pack(_MAGIC, worker, mine, keyed_hash(key, b"hello", theirs, mine, _NUMBER.pack(worker)))


def read_hello(secret: bytes, hello: bytes, mine: bytes) -> tuple[int, bytes]:
    """Return number and nonce of the worker that answered to our nonce `mine`; raise `FrameError` for others."""
    magic, worker, theirs, mac = _HELLO.unpack(hello)
    expected = keyed_hash(worker_key(secret, worker), b"hello", mine, theirs, _NUMBER.pack(worker))
    if magic != _MAGIC or not hmac.compare_digest(mac, expected):
        raise FrameError("a caller that is no worker of this job")
    return worker, theirs


def session_keys(key: bytes, launcher_nonce: bytes, worker_nonce: bytes) -> tuple[bytes, bytes]:
    """Return the keys of frames to the launcher and of frames to the worker."""
    return tuple(keyed_hash(key, way, launcher_nonce, worker_nonce) for way in (b"up", b"down"))  # type: ignore[return-value]
