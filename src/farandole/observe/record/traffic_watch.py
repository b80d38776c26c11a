"""What goes to other hosts, read from the kernel's own account of this process's connections.

No thread: it is read at the ends of steps, soon, then every few seconds, and at the end. All TCP connections of
the process are read, of every library (a backend, our transport); those within the host are not. See
[Note: bytes over busy time] in `read.link_traffic`. Linux only: elsewhere nothing is recorded.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address
from typing import NamedTuple

from ...core.host.open_sockets import Key, borrowed, open_sockets
from ...core.vocabulary.events import Event, LinkTraffic, StepDone, Traffic

EVERY_SECONDS = 2.0
_SOON_SECONDS = 0.5
"""Until the first reading: short runs have one, too."""
MOST_LINKS = 256
"""In one record; those that carried most."""
_LEAST_BYTES = 65536
_FIRST_STEP = 3
"""At whose end counting begins: what went before set up the run."""
# Offsets in Linux's `struct tcp_info`, to which fields are only ever added (uapi/linux/tcp.h; 4.10 and newer).
_ACKNOWLEDGED = struct.Struct("=Q"), 120
_BUSY_AND_CLOSED_WINDOW = struct.Struct("=QQ"), 168
_INFO_BYTES = 184


class _Count(NamedTuple):
    own_address: str
    peer_address: str
    sent_bytes: int
    busy_seconds: float


class TrafficWatch:
    """A recorder that hands `Traffic` to `record` at the ends of steps, when it is due."""

    def __init__(self, record: Callable[[Traffic], None], *, every_seconds: float = EVERY_SECONDS) -> None:
        self._record = record
        self._every = every_seconds
        self._process = os.getpid()
        self._steps = 0
        self._before: dict[Key, _Count] = {}
        self._at_seconds = self._step_end_seconds = 0.0
        self._due_seconds = min(_SOON_SECONDS, every_seconds)

    def record(self, event: Event) -> None:
        """Take one event."""
        if not isinstance(event, StepDone) or os.getpid() != self._process:
            return
        self._steps += 1
        self._step_end_seconds = event.end_seconds
        if self._steps < _FIRST_STEP:
            return
        if self._steps == _FIRST_STEP:
            self._before, self._at_seconds = read_connections(), event.end_seconds
        elif event.end_seconds - self._at_seconds >= self._due_seconds:
            self._due_seconds = self._every
            self._read(event.end_seconds)

    def _read(self, at_seconds: float) -> None:
        span, self._at_seconds = at_seconds - self._at_seconds, at_seconds
        before, self._before = self._before, read_connections()
        sums: dict[tuple[str, str], tuple[int, float]] = {}
        for key, now in self._before.items():
            then = before.get(key)
            sent, busy = (then.sent_bytes, then.busy_seconds) if then is not None else (0, 0.0)
            link = (now.own_address, now.peer_address)
            so_far = sums.get(link, (0, 0.0))
            sums[link] = (
                so_far[0] + max(0, now.sent_bytes - sent), so_far[1] + max(0.0, now.busy_seconds - busy)
            )  # fmt: skip
        most = sorted(sums.items(), key=lambda item: -item[1][0])[:MOST_LINKS]
        links = tuple(LinkTraffic(*link, *counts) for link, counts in most if counts[0] >= _LEAST_BYTES)
        if links:
            self._record(Traffic(at_seconds, span, links))

    def close(self) -> None:
        """Read what went out since the last reading, and drop all connections."""
        if (
            self._steps > _FIRST_STEP
            and self._step_end_seconds > self._at_seconds
            and os.getpid() == self._process
        ):
            self._read(self._step_end_seconds)
        self._before = {}


def read_connections() -> dict[Key, _Count]:
    """Return what each connection of this process to another host has sent so far."""
    found = {}
    with suppress(OSError):  # a system without /proc
        for key in open_sockets():
            with suppress(OSError, struct.error, ValueError), borrowed(key[0]) as connection:
                count = _count(connection)
                if count is not None:
                    found[key] = count
    return found


def _count(connection: socket.socket) -> _Count | None:
    if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    own, peer = _address(connection.getsockname()[0]), _address(connection.getpeername()[0])
    if own == peer or ip_address(peer).is_loopback:
        return None
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) < _INFO_BYTES:
        return None
    (sent,) = _ACKNOWLEDGED[0].unpack_from(info, _ACKNOWLEDGED[1])
    busy, closed = _BUSY_AND_CLOSED_WINDOW[0].unpack_from(info, _BUSY_AND_CLOSED_WINDOW[1])
    return _Count(own, peer, sent, max(0, busy - closed) / 1e6)


def _address(text: str) -> str:
    """Return an address without a zone, an IPv4 one as such."""
    address = ip_address(text.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
