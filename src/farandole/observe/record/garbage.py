"""Pauses of Python's garbage collector, as phases."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

from ...core.vocabulary.events import GARBAGE_COLLECTION, Phase

LEAST_SECONDS = 0.0005
"""Shorter collections are the young generation's, several a step, and cost nothing worth a record."""


class GarbageWatch:
    """Hands collections to `record` from `open` to `close`. All threads of the process stand still meanwhile."""

    def __init__(self, record: Callable[[Phase], None]) -> None:
        self._record = record
        self._begin_seconds = 0.0

    def open(self) -> None:
        """Begin to watch."""
        gc.callbacks.append(self._called)

    def close(self) -> None:
        """Stop watching; may be called twice."""
        if self._called in gc.callbacks:
            gc.callbacks.remove(self._called)

    def _called(self, phase: str, _: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if phase == "start":
            self._begin_seconds = now
        elif now - self._begin_seconds >= LEAST_SECONDS:
            self._record(Phase(GARBAGE_COLLECTION, self._begin_seconds, now))
