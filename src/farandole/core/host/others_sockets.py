"""Which Python sockets other threads of a program open while this one connects."""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
