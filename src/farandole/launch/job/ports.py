"""A port for the ranks to meet at, reserved without a race.

The port is bound here and never listened on. Because it was bound without SO_REUSEADDR the kernel
gives it to no other process; because SO_REUSEADDR is set afterwards, rank 0 (which sets it too, as every
server does) can bind and listen on it while it is still held here.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

from .emulated_hosts import HostNamespaces, in_network_of


class ReservedPort:
    """Holds a port of `address`, on `host` when it is not this one, until closed. A context manager."""

    def __init__(self, address: str = "127.0.0.1", host: HostNamespaces | None = None) -> None:
        self._socket = _reserve(address) if host is None else in_network_of(host, lambda: _reserve(address))
        self.address = address
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Give the port back."""
        self._socket.close()

    def __enter__(self) -> ReservedPort:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_in_use(port: int, process: int | None = None) -> bool:
    """Return whether a TCP socket listens at `port` or is connected with it, where `process`, or this one, is.

    The kernel knows of most connections for a minute after they were closed.
    """
    ending = f":{port:04X}"
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            _, *rows = Path(f"/proc/{process or 'self'}/net/{name}").read_text(encoding="ascii").splitlines()
            if any(address.endswith(ending) for row in rows for address in row.split()[1:3]):
                return True
    return False


def _reserve(address: str) -> socket.socket:
    reserved = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    reserved.bind((address, 0))
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return reserved
