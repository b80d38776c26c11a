"""The timelines of all ranks as one trace, on one clock.

Each file says when its zero was, in the wall time of its host; that is the clock they are put on. Hosts whose
clocks are kept by NTP agree to about a millisecond, so on different hosts trust longer differences only; ranks
of one host share a clock.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.vocabulary.errors import DataError
from ...core.vocabulary.run_files import write_private
from .operation_events import HEADER
from .trace_file import read_trace

_EPOCH = "start_time_since_epoch_in_micros"


@dataclass(frozen=True)
class _RankTrace:
    path: Path
    rank: int
    epoch_micros: int
    events: list[dict[str, Any]]


def merge_timelines(paths: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> int:
    """Write the timelines at `paths`, one a rank, as one to `out`; return the number of events.

    Processes of the trace are grouped by rank. Raises `DataError` for a file that is no timeline, that does not
    say when it began, or whose rank another one has too.
    """
    traces = [_read(Path(path), position) for position, path in enumerate(paths)]
    if not traces:
        raise DataError("no timeline to merge", remedy="name the files of the ranks, for example timeline*.json")
    owners: dict[int, Path] = {}
    for trace in traces:
        if trace.rank in owners:
            raise DataError(
                f"{owners[trace.rank]} and {trace.path} are both of rank {trace.rank}, expected one file a rank",
                remedy="leave one out; an earlier run's files may lie beside those of the last",
            )
        owners[trace.rank] = trace.path
    first = min(trace.epoch_micros for trace in traces)
    stride = 1 + max(event["pid"] for trace in traces for event in trace.events)
    merged = [
        _moved(event, trace.rank, trace.rank * stride, trace.epoch_micros - first)
        for trace in sorted(traces, key=lambda trace: trace.rank)
        for event in trace.events
    ]
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in merged)
    try:
        write_private(Path(out), f"[\n{lines}\n]\n")
    except OSError as problem:
        raise DataError(f"cannot write {os.fspath(out)}: {problem.strerror or problem}") from None
    return len(merged)


def _read(path: Path, position: int) -> _RankTrace:
    """Read one file. One that does not say its rank (Horovod writes rank 0 alone) has its position's."""
    events = read_trace(path)
    header: dict[str, Any] = {}
    for event in events:
        # Some writers leave the process out of instants that concern all of them.
        process, at, values = event.setdefault("pid", HEADER), event.get("ts", 0), event.setdefault("args", {})
        if not _is_count(process) or not _is_time(at) or not isinstance(values, dict):
            raise DataError(
                f"{path}: an event has pid {process!r}, ts {at!r}, args {values!r}; expected numbers, an object",
                remedy="give files that the ranks of one job have written",
            )
        if event.get("ph") == "M" and process == HEADER:
            header |= values
    epoch: Any = header.get(_EPOCH)
    rank: Any = header.get("rank", position)
    if not _is_count(epoch) or not _is_count(rank):
        raise DataError(
            f"{path} does not say when it began: {_EPOCH} is {epoch!r} and rank {rank!r}, expected counts",
            remedy="a merged file cannot be merged again: give the files of the ranks",
        )
    return _RankTrace(path, rank, epoch, events)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _moved(event: dict[str, Any], rank: int, first_process: int, shift_micros: int) -> dict[str, Any]:
    """Return the event on the common clock, among the processes of its rank."""
    moved = {**event, "pid": first_process + event["pid"]}
    if not moved["args"]:
        del moved["args"]
    if "ts" in moved:
        moved["ts"] += shift_micros
    if moved.get("s") == "g":
        moved["s"] = "p"  # a round of one rank is none of the others
    if event.get("ph") == "M":
        moved["args"] = _named(event, rank, moved["pid"])
    return moved


def _named(event: dict[str, Any], rank: int, process: int) -> dict[str, Any]:
    values = dict(event["args"])
    if event.get("name") == "process_sort_index":
        return {"sort_index": process}
    if event["pid"] == HEADER:
        values.pop(_EPOCH, None)
        values.setdefault("name", f"rank {rank}")
    elif "name" in values:
        values["name"] = f"{rank}: {values['name']}"
    return values
