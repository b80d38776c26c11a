"""A trace of PyTorch's profiler (Kineto): `kineto_events` keeps numbers of it, `kineto_steps` makes steps."""

from __future__ import annotations

from typing import Any

from ...core.vocabulary.errors import DataError
from .foreign_rank import ForeignRank
from .kineto_events import CPU, KinetoEvents
from .kineto_steps import bounds_of, steps_of
from .trace_text import Trace, is_number

_HEAD = {"schemaVersion", "distributedInfo", "deviceProperties", "record_shapes", "baseTimeNanoseconds"}


class KinetoReader:
    """Takes one rank's trace."""

    keys = frozenset({*_HEAD, "host_name"})
    """What is read of the head."""

    def __init__(self) -> None:
        self._events = KinetoEvents()
        self.take = self._events.take

    def is_mine(self, event: dict[str, Any]) -> bool:
        """Return whether only the profiler writes such an event."""
        return event.get("cat") in CPU

    def is_my_head(self, head: dict[str, Any]) -> bool:
        """Return whether only the profiler writes such a head."""
        return bool(_HEAD & head.keys())

    def finish(self, trace: Trace, position: int) -> ForeignRank:
        """Return the rank; one that does not say its number has its position's.

        Raises `DataError` when nothing took time.
        """
        if not self._events.count:
            raise DataError(
                f"{trace.path} has no event that took time", remedy="was anything run inside the profiler?"
            )
        info = trace.head.get("distributedInfo")
        info = info if isinstance(info, dict) else {}
        rank, size = info.get("rank"), info.get("world_size")
        base = trace.head.get("baseTimeNanoseconds")
        bounds, notes = bounds_of(self._events, trace.path.name)
        steps = steps_of(self._events, bounds)
        return ForeignRank(
            trace.path,
            rank if type(rank) is int and rank >= 0 else position,
            size if type(size) is int else None,
            str(trace.head.get("host_name") or info.get("host") or "unknown"),
            base / 1e9 if type(base) is int and is_number(base) else None,
            steps[0].begin_seconds,
            steps,
            (),
            [*trace.notes, *notes],
        )
