"""The form of a request, a reply and a snapshot: JSON values and tensors. No pickle.

A body is the length of its JSON text, the text, and the bytes of each tensor, each begun at a multiple of 16. The
text has the dtype and the shape of each tensor, so that its reader knows how long the body is before it keeps it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from ...comm.messages.element_bytes import bytes_of
from ...core.wire.framing import FrameError

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
