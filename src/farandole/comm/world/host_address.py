"""Which of this host's addresses the other ranks reach it by."""

from __future__ import annotations

import errno
import fcntl
import socket
import struct
import time
from collections.abc import Callable, Collection

from ...core.environ import env
from ...core.vocabulary.errors import ConfigError

_SIOCGIFADDR = 0x8915
_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EINVAL)
"""Errors of connect without a route; the last one is that of a blackhole route."""
_LOOK_SECONDS = 0.1


def own_address(meeting_point: str | None) -> str:
    """Return the address to listen on.

    That of the interface named for the backend (GLOO_SOCKET_IFNAME), or else the one from which the
    meeting point is reached. Raises `ConfigError` for an interface that does not exist.
    """
    interface = env.read_socket_interface()
    if interface is not None:
        return _address_of(interface)
    if meeting_point is None:
        return "127.0.0.1"
    try:
        return _source_address(meeting_point)
    except OSError:
        return "127.0.0.1"


def has_route(address: str) -> bool:
    """Return whether the kernel knows a way to `address`; nothing is sent."""
    try:
        _source_address(address)
    except OSError as problem:
        return problem.errno not in _NO_ROUTE
    return True


def _source_address(address: str) -> str:
    """Return from which address of this host the kernel would reach `address`; raise OSError if it cannot."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing: the kernel only chooses a route
        source: str = probe.getsockname()[0]
        return source


def wait_for_routes(addresses: Collection[str], seconds: float, *, is_over: Callable[[], bool]) -> None:
    """Return when there is a way to all of `addresses`, after `seconds`, or when the wait `is_over`.

    gloo gives up at the first address that has none, and a host that is starting may have it in a moment.
    """
    deadline = time.monotonic() + seconds
    missing = [address for address in addresses if address and not has_route(address)]
    while missing and time.monotonic() < deadline and not is_over():
        time.sleep(_LOOK_SECONDS)
        missing = [address for address in missing if not has_route(address)]


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            request = struct.pack("256s", interface[:15].encode())
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as problem:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigError(
                f"GLOO_SOCKET_IFNAME={interface}: {problem.strerror}", remedy=f"this host has {names}"
            ) from None
    return socket.inet_ntoa(answer[20:24])
