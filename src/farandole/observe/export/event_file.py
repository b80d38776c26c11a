"""TensorBoard's event files, written without TensorBoard: records with checksums around protocol buffers.

Only what is needed: scalars and images of one run's folder.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

_MASK = 0xA282EAD8


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_CRC_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    """Return the Castagnoli checksum.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    value = 0xFFFFFFFF
    for byte in data:
        value = _CRC_TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def _masked(data: bytes) -> bytes:
    value = crc32c(data)
    return struct.pack("<I", ((value >> 15 | value << 17) + _MASK) & 0xFFFFFFFF)


def record(data: bytes) -> bytes:
    """Return `data` as one record of the file."""
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def _varint(value: int) -> bytes:
    out = bytearray()
    value &= (1 << 64) - 1
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _bytes(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _event(wall_seconds: float, step: int, summary: bytes) -> bytes:
    return b"\x09" + struct.pack("<d", wall_seconds) + _integer(2, step) + _bytes(5, summary)


def scalars(wall_seconds: float, step: int, values: Iterable[tuple[str, float]]) -> bytes:
    """Return one event with the values by tag."""
    found = [_bytes(1, _bytes(1, tag.encode()) + b"\x15" + struct.pack("<f", value)) for tag, value in values]
    return _event(wall_seconds, step, b"".join(found))


def image(wall_seconds: float, step: int, tag: str, size: tuple[int, int], png: bytes) -> bytes:
    """Return one event with an image of `size` (width, height)."""
    content = _integer(1, size[1]) + _integer(2, size[0]) + _integer(3, 3) + _bytes(4, png)
    return _event(wall_seconds, step, _bytes(1, _bytes(1, tag.encode()) + _bytes(4, content)))


def file_of(wall_seconds: float, events: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the pieces of an event file: its version, then the events."""
    yield record(b"\x09" + struct.pack("<d", wall_seconds) + _bytes(3, b"brain.Event:2"))
    for event in events:
        yield record(event)
