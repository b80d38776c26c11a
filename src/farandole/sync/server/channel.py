"""One end of a connection between a rank and a server: who is there, and messages in order.

[Note: signed texts] Both ends know the key of the server, which only the ranks of the job are given. The server
asks with random bytes, the caller answers with a HMAC of them and asks in turn, and both derive a key for each
direction from the two. Each message carries its number and a HMAC of that and of its text, which says of which
tensors the bytes follow; these are clear text, as the backend's traffic is. So no request or reply can be made
up, left out, repeated or sent back.
"""

from __future__ import annotations

import hmac
import json
import math
import secrets
import select
import socket
import struct
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from ...comm.messages import bytes_of
from ...comm.transport.connect import send_views
from ...core.framing import HEADER, MAC_BYTES, FrameError, keyed_hash
from ...core.vocabulary import errors
from ...core.vocabulary.errors import CommError, FarandoleError

# Errors as JSON: what a reply and a snapshot say of one. A name, a text and a remedy; no pickle.


def write_problem(problem: FarandoleError) -> dict[str, str]:
    """Return an error as JSON values."""
    return {"kind": type(problem).__name__, "message": problem.message, "remedy": problem.remedy}


def read_problem(said: Mapping[str, str], *, rank: int, operation: str) -> FarandoleError:
    """Return the error that `write_problem` was given; `rank` and `operation` are those of who raises it now."""
    kind: Any = getattr(errors, said["kind"], FarandoleError)
    message, remedy = said["message"], said["remedy"]
    made: FarandoleError = (
        kind(message.partition(": ")[2], rank=rank, operation=operation, remedy=remedy)
        if issubclass(kind, CommError)
        else kind(message, remedy=remedy)
    )
    return made


# The form of a request, a reply and a snapshot: JSON values and tensors. No pickle.
#
# A body is the length of its JSON text, the text, and the bytes of each tensor, each begun at a multiple of 16.
# The text has the dtype and the shape of each tensor, so that its reader knows how long the body is before it
# keeps it.

LENGTH: Final = struct.Struct("<Q")
"""Bytes of the JSON text."""
MOST_TEXT_BYTES: Final = 64 << 20
_ALIGNMENT = 16
_DTYPES: Final = {
    str(each).removeprefix("torch."): each
    for each in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
        torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
    )
}  # fmt: skip


@dataclass(frozen=True)
class ServerMessage:
    """Values and tensors that belong together."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """JSON values by name."""
    tensors: Sequence[torch.Tensor] = ()
    """In CPU memory; of any dtype that `_DTYPES` lists."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(each.nbytes for each in self.tensors)


def write_text(message: ServerMessage) -> bytes:
    """Return the JSON text of a message, with what its tensors are. Raises `FrameError` for a dtype it has not."""
    kinds = [(str(each.dtype).removeprefix("torch."), list(each.shape)) for each in message.tensors]
    strange = [kind for kind, _ in kinds if kind not in _DTYPES]
    if strange:
        raise FrameError(f"a tensor of {strange[0]} in a message: expected one of {', '.join(_DTYPES)}")
    text = json.dumps({"values": message.values, "tensors": kinds}, separators=(",", ":")).encode()
    if len(text) > MOST_TEXT_BYTES:
        raise FrameError(f"a message with {len(text)} bytes of values: expected at most {MOST_TEXT_BYTES}")
    return text


def tensor_views(message: ServerMessage) -> list[memoryview]:
    """Return the bytes of a message's tensors, each filled up to a multiple of 16; views if possible."""
    views = []
    for each in message.tensors:
        if each.numel():
            views.append(bytes_of(each).numpy().data)
        if each.nbytes % _ALIGNMENT:
            views.append(memoryview(bytes(_ALIGNMENT - each.nbytes % _ALIGNMENT)))
    return views


@dataclass(frozen=True)
class Outline:
    """What the text of a message says: its values, and of which tensors the bytes follow."""

    values: dict[str, Any]
    kinds: list[tuple[torch.dtype, list[int]]]

    @property
    def nbytes(self) -> int:
        """Bytes that follow the text."""
        return sum(_filled(_nbytes(*kind)) for kind in self.kinds)

    @classmethod
    def read(cls, text: bytes | bytearray, most_bytes: int) -> Outline:
        """Read a text; raise `FrameError` for none of ours, or more than `most_bytes` of tensors."""
        try:
            found = json.loads(bytes(text))
            values = found["values"]
            kinds = [(_DTYPES[kind], [int(each) for each in shape]) for kind, shape in found["tensors"]]
        except (ValueError, RecursionError, KeyError, TypeError):
            raise FrameError(f"message {bytes(text[:80])!r}: expected values and tensors") from None
        if not isinstance(values, dict) or any(each < 0 for _, shape in kinds for each in shape):
            raise FrameError(f"message {bytes(text[:80])!r}: expected values by name, and shapes")
        outline = cls(values, kinds)
        if outline.nbytes > most_bytes:
            raise FrameError(f"a message with tensors of {outline.nbytes} bytes: expected at most {most_bytes}")
        return outline

    def message(self, memory: torch.Tensor) -> ServerMessage:
        """Return the message whose tensors are views of `memory`, (bytes,) of uint8."""
        tensors, begin = [], 0
        for dtype, shape in self.kinds:
            nbytes = _nbytes(dtype, shape)
            tensors.append(memory[begin : begin + nbytes].view(dtype).view(shape))
            begin += _filled(nbytes)
        return ServerMessage(self.values, tensors)


def _nbytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return math.prod(shape) * dtype.itemsize


def _filled(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


QUESTION_BYTES: Final = 32
HELLO: Final = struct.Struct(f"<II{QUESTION_BYTES}s{MAC_BYTES}s")
"""Client, generation, its own question, code."""
_HEAD_BYTES = HEADER.size + MAC_BYTES


@dataclass(frozen=True)
class Hello:
    """What a caller says of itself."""

    client: int
    generation: int
    question: bytes

    @classmethod
    def make(cls, client: int, generation: int) -> Hello:
        """Return one with a question that was never asked before."""
        return cls(client, generation, secrets.token_bytes(QUESTION_BYTES))

    def pack(self, key: bytes, asked: bytes) -> bytes:
        """Return its bytes, which answer what the server `asked`."""
        return HELLO.pack(self.client, self.generation, self.question, self._code(key, asked))

    @classmethod
    def read(cls, key: bytes, asked: bytes, data: bytes) -> Hello | None:
        """Return what was said in answer to `asked`; None: not by a rank of this job."""
        client, generation, question, code = HELLO.unpack(data)
        found = cls(client, generation, question)
        return found if hmac.compare_digest(code, found._code(key, asked)) else None

    def keys(self, key: bytes, asked: bytes) -> tuple[bytes, bytes]:
        """Return the keys of requests and of replies."""
        up, down = (keyed_hash(key, way, asked, self.question) for way in (b"request", b"reply"))
        return up, down

    def _code(self, key: bytes, asked: bytes) -> bytes:
        who = struct.pack("<II", self.client, self.generation)
        return keyed_hash(key, b"hello", asked, who, self.question)


@dataclass(eq=False)
class ServerChannel:
    """Messages over a connection that never blocks. See [Note: signed texts]."""

    socket: socket.socket
    key_out: bytes
    key_in: bytes
    most_bytes: int
    """Tensors of a message that is taken."""
    _sent: int = 0
    _taken: int = 0
    _outgoing: deque[memoryview] = field(default_factory=deque)
    _head: bytearray = field(default_factory=bytearray)
    """The beginning of the message that is arriving: tag, length and HMAC, then its text."""
    _text_bytes: int = -1
    _outline: Outline | None = None
    _memory: torch.Tensor | None = None
    _filled: int = 0

    @property
    def has_more_to_send(self) -> bool:
        """Whether something is queued that the kernel has not taken yet."""
        return bool(self._outgoing)

    def queue(self, message: ServerMessage) -> None:
        """Have a message sent after all that is queued; its tensors must not change before that."""
        text = write_text(message)
        head = HEADER.pack(self._sent, len(text))
        self._outgoing.append(memoryview(head + keyed_hash(self.key_out, head, text) + text))
        self._outgoing.extend(tensor_views(message))
        self._sent += 1

    def send_what_fits(self) -> None:
        """Give the kernel what it takes. Raises `OSError` when the connection is lost."""
        send_views(self.socket, self._outgoing)

    def receive(self) -> list[ServerMessage]:
        """Return the messages that have arrived whole.

        Raises:
            OSError: the connection is lost.
            FrameError: what arrived is not from our peer.
        """
        found: list[ServerMessage] = []
        try:
            while True:
                message = self._step()
                if message is not None:
                    found.append(message)
        except BlockingIOError:
            return found
        except ConnectionResetError:
            if found:  # the next call says so again
                return found
            raise

    def close(self) -> None:
        """Close the connection."""
        self._outgoing.clear()
        self.socket.close()

    def _step(self) -> ServerMessage | None:
        """Take one piece; return a message that it completes."""
        if self._outline is None:
            wanted = _HEAD_BYTES + max(0, self._text_bytes) - len(self._head)
            self._head += self._take(bytearray(wanted))
            if len(self._head) < _HEAD_BYTES + max(0, self._text_bytes):
                return None
            if self._text_bytes < 0:
                self._text_bytes = self._read_length()
                return None
            self._outline = self._read_text()
            self._memory, self._filled = torch.empty(self._outline.nbytes, dtype=torch.uint8), 0
        assert self._memory is not None, "it comes with the outline"
        if self._filled < self._memory.numel():
            count = self.socket.recv_into(self._memory.numpy().data[self._filled :])
            if not count:
                raise ConnectionResetError("it closed its connection")
            self._filled += count
            if self._filled < self._memory.numel():
                return None
        message = self._outline.message(self._memory)
        self._outline = self._memory = None
        self._head.clear()
        self._text_bytes = -1
        return message

    def _take(self, into: bytearray) -> bytearray:
        if not into:
            return into
        count = self.socket.recv_into(into)
        if not count:
            raise ConnectionResetError("it closed its connection")
        return into[:count]

    def _read_length(self) -> int:
        tag, length = HEADER.unpack_from(self._head)
        if tag != self._taken or length > MOST_TEXT_BYTES:
            raise FrameError(f"message {tag} with a text of {length} bytes: expected message {self._taken}")
        return int(length)

    def _read_text(self) -> Outline:
        head, mac, text = (
            bytes(self._head[: HEADER.size]),
            bytes(self._head[HEADER.size : _HEAD_BYTES]),
            bytes(self._head[_HEAD_BYTES:]),
        )
        if not hmac.compare_digest(mac, keyed_hash(self.key_in, head, text)):
            raise FrameError(f"message {self._taken} is not from our peer")
        self._taken += 1
        return Outline.read(text, self.most_bytes)


def wait_for_any(channels: Iterable[ServerChannel], seconds: float) -> None:
    """Sleep until something can be received or sent, for at most `seconds`."""
    poll = select.poll()  # select() takes no file above 1,023
    for each in channels:
        poll.register(each.socket, select.POLLIN | (select.POLLOUT if each.has_more_to_send else 0))
    poll.poll(1e3 * seconds)


def open_connection(address: str, port: int, timeout_seconds: float) -> socket.socket:
    """Return a connection. Raises `OSError`."""
    made = socket.create_connection((address, port), timeout_seconds)
    if made.getsockname() == made.getpeername():  # a port that is free now may call itself
        made.close()
        raise ConnectionRefusedError("no process listens there")
    return made
