"""A port for the ranks to meet at, reserved without a race.

The port is bound here and never listened on. Because it was bound without SO_REUSEADDR the kernel
gives it to nobody else; because SO_REUSEADDR is set afterwards, rank 0 (which sets it too, as every
server does) can bind and listen on it while it is still held here.
"""

from __future__ import annotations

import socket
from types import TracebackType


class ReservedPort:
    """Holds a port of `address` until closed. A context manager."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.bind((address, 0))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.address = address
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Give the port back."""
        self._socket.close()

    def __enter__(self) -> ReservedPort:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
