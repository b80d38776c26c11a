"""The socket between a rank and its writer: JSON messages, with a length before each, and descriptors."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("<I")


def send_message(channel: socket.socket, message: Any, descriptors: list[int]) -> None:
    """Send one message, and descriptors with it. Raises `OSError` if the other end is gone."""
    text = json.dumps(message).encode()
    begin = _LENGTH.pack(len(text))
    if descriptors:
        sent = socket.send_fds(channel, [begin], descriptors)
        begin = begin[sent:]
    channel.sendall(begin + text)


def receive_message(channel: socket.socket) -> tuple[Any, list[int]]:
    """Return the next message and its descriptors. Raises `EOFError` if the other end is gone."""
    begin, descriptors, _, _ = socket.recv_fds(channel, _LENGTH.size, 1)
    begin += _receive(channel, _LENGTH.size - len(begin)) if begin else _end()
    return json.loads(_receive(channel, _LENGTH.unpack(begin)[0])), descriptors


def _receive(channel: socket.socket, nbytes: int) -> bytes:
    received = bytearray()
    while len(received) < nbytes:
        received += channel.recv(min(nbytes - len(received), 1 << 20)) or _end()
    return bytes(received)


def _end() -> bytes:
    raise EOFError("the other end of the writer's socket is closed")
