"""A trace of PyTorch's profiler (Kineto): `kineto_events` keeps numbers of it, `kineto_steps` makes steps."""

from __future__ import annotations

from pathlib import Path

from ...core.vocabulary.errors import DataError
from .foreign_rank import ForeignRank
from .kineto_events import KinetoEvents
from .kineto_steps import bounds_of, steps_of
from .trace_text import PIECE_BYTES, Trace, is_number

_KEYS = frozenset({"distributedInfo", "baseTimeNanoseconds", "host_name"})


def read_kineto(path: Path, position: int, *, piece_bytes: int = PIECE_BYTES) -> ForeignRank:
    """Return the rank of a trace; one that does not say its number has its `position`.

    The file is read once: it may be a pipe. Raises `DataError` for what is no trace, or when nothing took time.
    """
    trace, events = Trace(path, _KEYS, piece_bytes=piece_bytes), KinetoEvents()
    for event in trace.events():
        events.take(event)
    if not events.count:
        raise DataError(f"{path} has no event that took time", remedy="was anything run inside the profiler?")
    info = trace.head.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    rank, size = info.get("rank"), info.get("world_size")
    base = trace.head.get("baseTimeNanoseconds")
    bounds, notes = bounds_of(events, path.name)
    steps = steps_of(events, bounds)
    return ForeignRank(
        path,
        rank if type(rank) is int and rank >= 0 else position,
        size if type(size) is int else None,
        str(trace.head.get("host_name") or info.get("host") or "unknown"),
        base / 1e9 if type(base) is int and is_number(base) else None,
        steps[0].begin_seconds,
        steps,
        notes=notes,
    )
