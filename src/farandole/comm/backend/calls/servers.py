"""The threads that carry out what a group has queued, and the callbacks of its futures.

[Note: callbacks] What a user hangs on a future, such as a communication hook of DDP, may make the next call and
wait for that one's future, in C++, where no code of ours can carry it out. So a thread that calls users' functions
is none of those that serve meanwhile: there is always one that does, as in torch's own backends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Servers:
    """Threads of one queue; each runs `serve` until that returns. See [Note: callbacks]."""

    def __init__(self, name: str, serve: Callable[[], object]) -> None:
        self._name, self._serve = name, serve
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._free = 0
        """How many are in no callback."""

    def start(self) -> None:
        """Start a thread, unless there is one that is in no callback."""
        with self._lock:
            if self._free:
                return
            self._free += 1
            thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._threads.add(thread)
            thread.start()

    def call_back(self, callback: Callable[[], object]) -> None:
        """Call a user's function, while another thread serves."""
        is_server = threading.current_thread() in self._threads
        if is_server:
            with self._lock:
                self._free -= 1
        try:
            self.start()
            callback()
        finally:
            if is_server:
                with self._lock:
                    self._free += 1

    def join(self, seconds: float) -> None:
        """Wait for the threads, for each at most so long."""
        for thread in self._threads - {threading.current_thread()}:
            thread.join(seconds)
