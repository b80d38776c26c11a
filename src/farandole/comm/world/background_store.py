"""Messages between ranks from a thread in the background, through the world's store.

A wait of one thread would block the store's connection for the others, which may be what the wait is for: so a
thread in the background has a connection of its own (`Store.clone`).
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...core.host.open_sockets import open_sockets
from ...core.vocabulary.errors import Stalled
from .comm_errors import translated
from .forks import replace_sockets
from .world import World

_PART_BYTES = 1 << 20
"""A store refuses values of several megabytes."""
_POLL_SECONDS = 0.5


class BackgroundStore:
    """One connection to the store, for one thread. The world has several ranks."""

    def __init__(self, world: World) -> None:
        assert world.store is not None, "a world of one has nobody to write to"
        self._world = world
        with translated(world, "opening a connection to the store"):
            store: Any = world.store  # torch's stubs do not know `clone`
            before = open_sockets()
            self._store: dist.Store = store.clone()
        self._sockets = open_sockets() - before
        world.session.call_in_forked_child(self.forget)

    def post(self, key: str, text: str) -> None:
        """Publish `text` under a key that is used once."""
        parts = [text[at : at + _PART_BYTES] for at in range(0, len(text), _PART_BYTES)] or [""]
        with translated(self._world, key):
            for index, part in enumerate(parts):
                self._store.set(f"{key}/{index}", part)
            self._store.set(f"{key}/count", str(len(parts)))

    def take(self, key: str, what: str, timeout_seconds: float) -> str:
        """Return what was published under `key`, and remove it if `keep` is not set.

        Raises `Stalled`, naming `what`, when it does not come in time or the world is closed, and `CommError`.
        """
        end = time.monotonic() + timeout_seconds
        with translated(self._world, key):
            while not self._store.check([f"{key}/count"]):
                if time.monotonic() > end or self._world.closed:
                    raise Stalled(
                        f"{what} did not come within {timeout_seconds:g} s",
                        rank=self._world.job_rank,
                        operation=key,
                    )
                self._wait(f"{key}/count")
            count = int(self._store.get(f"{key}/count"))
            return "".join(self._store.get(f"{key}/{index}").decode() for index in range(count))

    def remove(self, key: str) -> None:
        """Remove what was published under `key`."""
        with translated(self._world, key):
            count = int(self._store.get(f"{key}/count"))
            for name in (*range(count), "count"):
                self._store.delete_key(f"{key}/{name}")

    def forget(self) -> None:
        """In a forked child: hold no connection of the rank's."""
        replace_sockets(self._sockets)

    def _wait(self, key: str) -> None:
        try:
            self._store.wait([key], timedelta(seconds=_POLL_SECONDS))
        except (dist.DistStoreError, dist.DistNetworkError) as problem:
            if isinstance(problem, dist.DistNetworkError):
                raise
