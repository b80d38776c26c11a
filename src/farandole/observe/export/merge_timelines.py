"""The timelines of all ranks as one trace, on one clock.

Each file says when its zero was, in the wall time of its host; that is the clock they are put on. Hosts whose
clocks are kept by NTP agree to about a millisecond, so on different hosts trust longer differences only; ranks
of one host share a clock.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...core.vocabulary.errors import DataError
from .operation_timeline import HEADER
from .trace_file import TraceEvent, read_trace, write_trace

_EPOCH = "start_time_since_epoch_in_micros"
_MOST = 2**62


def merge_timelines(paths: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> int:
    """Write the timelines at `paths`, one a rank, as one to `out`; return the number of events.

    Processes of the trace are grouped by rank. Raises `DataError` for a file that is no timeline, that does not
    say when it began, or whose rank another one has too.
    """
    found: dict[int, tuple[Path, int, list[TraceEvent]]] = {}
    for position, path in enumerate(map(Path, paths)):
        rank, epoch, events = _read(path, position)
        if rank in found:
            raise DataError(
                f"{found[rank][0]} and {path} are both of rank {rank}, expected one file a rank",
                remedy="leave one out; an earlier run's files may lie beside those of the last",
            )
        found[rank] = path, epoch, events
    if not found:
        raise DataError("no timeline to merge", remedy="name the files of the ranks, for example timeline*.json")
    first = min(epoch for _, epoch, _ in found.values())
    stride = 1 + max(event["pid"] for _, _, events in found.values() for event in events)
    merged = [
        _moved(event, rank, rank * stride, epoch - first)
        for rank, (_, epoch, events) in sorted(found.items())
        for event in events
    ]
    write_trace(Path(out), merged)
    return len(merged)


def _read(path: Path, position: int) -> tuple[int, int, list[TraceEvent]]:
    """Return rank, zero and events of a file. One that does not say its rank (Horovod's) has its position's."""
    events = read_trace(path)
    header: dict[str, Any] = {}
    for event in events:
        # Some writers leave the process out of instants that concern all of them.
        process, at, values = event.setdefault("pid", HEADER), event.get("ts", 0), event.setdefault("args", {})
        is_time = type(at) in (int, float) and -_MOST < at < _MOST
        if not _is_count(process) or not is_time or not isinstance(values, dict):
            raise DataError(
                f"{path}: an event has pid {process!r}, ts {at!r}, args {values!r}; expected numbers, an object",
                remedy="give files that the ranks of one job have written",
            )
        if event.get("ph") == "M" and process == HEADER:
            header |= values
    rank: Any = header.get("rank", position)
    epoch: Any = header.get(_EPOCH)
    if not _is_count(epoch) or not _is_count(rank):
        raise DataError(
            f"{path} does not say when it began: {_EPOCH} is {epoch!r} and rank {rank!r}, expected counts",
            remedy="a merged file cannot be merged again: give the files of the ranks",
        )
    return rank, epoch, events


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _moved(event: TraceEvent, rank: int, first_process: int, shift_micros: int) -> TraceEvent:
    """Return the event on the common clock, among the processes of its rank."""
    values, process = event["args"], first_process + event["pid"]
    if event.get("ph") == "M":
        if event.get("name") == "process_sort_index":
            values = {"sort_index": process}
        elif event["pid"] == HEADER:
            values = {"name": f"rank {rank}", **values}
            values.pop(_EPOCH, None)
        elif "name" in values:
            values = {**values, "name": f"{rank}: {values['name']}"}
    moved = {**event, "pid": process, "args": values}
    if not values:
        del moved["args"]
    if "ts" in moved:
        moved["ts"] += shift_micros
    if moved.get("s") == "g":
        moved["s"] = "p"  # a round of one rank is none of the others
    return moved
