"""Tests which hosts are reachable: a connection attempt to each, which needs no listener.

A call that is refused has an answer, so the way there and back is good. No answer within a few seconds means
a link that is cut, a host that is away, or no route.
"""

from __future__ import annotations

import errno
import random
import selectors
import socket
import time
from collections.abc import Sequence
from contextlib import suppress

REACH_SECONDS = 2.5
"""The kernel sends a lost call again after 1 s."""
MOST_CALLS = 64
_UNDER_WAY = (errno.EINPROGRESS, errno.EWOULDBLOCK)
_ANSWERED = (0, errno.ECONNREFUSED, errno.ECONNRESET)


def unreachable(ways: Sequence[tuple[str, int]], seconds: float = REACH_SECONDS) -> list[str]:
    """Return the addresses, of (address, port), that do not answer in time; of many, a sample is called."""
    called = list(ways) if len(ways) <= MOST_CALLS else random.sample(list(ways), MOST_CALLS)
    missed = []
    with selectors.DefaultSelector() as selector:
        for address, port in called:
            call = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
            call.setblocking(False)
            code = call.connect_ex((address, port))
            if code in _UNDER_WAY:
                selector.register(call, selectors.EVENT_WRITE, address)
                continue
            call.close()
            if code not in _ANSWERED:
                missed.append(address)
        deadline = time.monotonic() + seconds
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                call = _socket_of(key)
                if call.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) not in _ANSWERED:
                    missed.append(key.data)
                selector.unregister(call)
                call.close()
        for key in list(selector.get_map().values()):
            missed.append(key.data)
            with suppress(OSError):
                _socket_of(key).close()
    return missed


def _socket_of(key: selectors.SelectorKey) -> socket.socket:
    assert isinstance(key.fileobj, socket.socket), "only calls are watched"
    return key.fileobj
