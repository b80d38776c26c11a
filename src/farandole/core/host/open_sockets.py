"""The sockets of this process, also those of backends, which give no access to them (Linux only).

And how TCP decides its rate.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

Key = tuple[int, int]
"""Descriptor and inode: a descriptor alone may be another socket by now."""


def open_sockets() -> set[Key]:
    """Return all sockets of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are numbers
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found


@contextmanager
def borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Lend a socket that other code of this process opened. Raises `OSError` when it is none, or none any more."""
    ours = os.dup(descriptor)
    try:
        made = socket.socket(fileno=ours)
    except OSError:
        os.close(ours)
        raise
    with made:
        yield made


def accepted_by(listeners: Iterable[Key], sockets: Iterable[Key]) -> set[Key]:
    """Return which of `sockets` are connections to a TCP listener of `listeners`: they have its local port."""
    ports = {port for port, listens in map(_local_port, listeners) if listens}
    return {key for key in sockets if ports and _local_port(key)[0] in ports}


def _local_port(key: Key) -> tuple[int | None, bool]:
    """Return the port of a TCP socket, None for others, and whether it listens."""
    with suppress(OSError), borrowed(key[0]) as ours:
        if ours.family in (socket.AF_INET, socket.AF_INET6) and ours.type == socket.SOCK_STREAM:
            return ours.getsockname()[1], bool(ours.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return None, False


# Which Python sockets other threads of a program open while this one connects.

_lock = threading.Lock()
_watchers: list[tuple[int, weakref.WeakSet[socket.socket]]] = []
"""Threads that connect, and what they have seen of others."""
_plain_init = socket.socket.__init__


@contextmanager
def sockets_of_other_threads() -> Iterator[weakref.WeakSet[socket.socket]]:
    """Yield a set that gets every Python socket that another thread makes or accepts meanwhile.

    Sockets that C code opens are in none: neither a backend's nor a library's of the program's own.
    """
    seen: weakref.WeakSet[socket.socket] = weakref.WeakSet()
    watcher = (threading.get_ident(), seen)
    with _lock:
        _watchers.append(watcher)
        if len(_watchers) == 1:
            socket.socket.__init__ = _note_and_init  # type: ignore[method-assign, assignment]
    try:
        yield seen
    finally:
        with _lock:
            _watchers[:] = [other for other in _watchers if other is not watcher]
            if not _watchers and socket.socket.__init__ is _note_and_init:
                socket.socket.__init__ = _plain_init  # type: ignore[method-assign]


def _note_and_init(made: socket.socket, *arguments: Any, **named: Any) -> None:
    _plain_init(made, *arguments, **named)
    here = threading.get_ident()
    with _lock:
        for thread, seen in _watchers:
            if thread != here:
                seen.add(made)


# The TCP congestion control of this host (Linux only).
#
# [Note: bursts and pacing] Training sends in bursts: some buckets in one go, then nothing until the next step. BBR
# sends at the rate it believes the path to have, and after a pause that belief may be wrong for a while: over an
# emulated link of 100 Mbit/s, 3 to 10 of 90 exchanges in bf16 took 1.3 to 5 times as long as usual with it, and
# one of 140 with cubic (docs/results/network.md). So a run says what it had.


SETTINGS = Path("/proc/sys/net/ipv4")
IN_USE = SETTINGS / "tcp_congestion_control"
USUAL = "cubic"
"""Linux's own choice."""
PACED = ("bbr",)
"""Those that send at a rate learned before a pause."""


def congestion_control() -> str | None:
    """Return what new connections of this host use, or None where the system does not say.

    In a network namespace: what is used there.
    """
    try:
        return IN_USE.read_text(encoding="ascii").strip() or None
    except (OSError, ValueError):
        return None


def available_congestion_controls(settings: Path = SETTINGS) -> tuple[str, ...]:
    """Return those that this kernel has loaded."""
    return _names(settings / "tcp_available_congestion_control")


def allowed_congestion_controls(settings: Path = SETTINGS) -> tuple[str, ...]:
    """Return those that every user may set; in a network namespace no others can be set, not even by root."""
    return _names(settings / "tcp_allowed_congestion_control")


def _names(file: Path) -> tuple[str, ...]:
    try:
        return tuple(file.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return ()
