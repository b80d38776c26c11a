"""The gradient buckets as Horovod's timeline: one file a rank, for tools and eyes that know it.

A bucket is an operation by name. NEGOTIATE_ALLREDUCE lasts from this rank's launch until all ranks have launched
it, with an instant for each rank that came; then ALLREDUCE, in it QUEUE and what carries it. Where the clocks of
hosts were not compared, a rank sees only itself come.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..format.rows import StepRow
from ..read.timeline_reader import RankTimeline
from ..trace.bucket_timeline import lane_name
from ..trace.operation_events import OperationEvents
from ..trace.operation_timeline import timeline_path
from ..trace.trace_file import encode
from . import spans
from .output import write_bytes
from .source import ExportSource, rows_by_step

KIND = "allreduce"
QUEUE = "QUEUE"
CARRIED = "TCP_ALLREDUCE"
WAIT = "WAIT"


def write_horovod(records: ExportSource, out: Path) -> list[Path]:
    """Write rank 0's timeline to `out`, the others beside it as ``.rank<r>``; return what was written."""
    together = {
        step: [(rank, row) for rank, row in rows if rank not in records.incomparable]
        for step, rows in rows_by_step(records.timelines).items()
    }
    return [
        write_bytes(timeline_path(out, timeline.started.rank), _lines(_events(records, timeline, together)))
        for timeline in records.timelines
    ]


def _lines(events: list[dict[str, Any]]) -> Iterator[bytes]:
    yield b"[" + b",".join(map(encode, events)) + b"\n]\n"


def _events(
    records: ExportSource, timeline: RankTimeline, together: dict[int, list[tuple[int, StepRow]]]
) -> list[dict[str, Any]]:
    rank, zero = timeline.started.rank, records.zero_of(timeline)
    made = OperationEvents(zero, mark_cycles=False)
    made.header(round(records.epoch_seconds * 1e6), rank, records.size, timeline.started.host)
    for row in timeline.steps:
        others = together[row.step] if rank not in records.incomparable else [(rank, row)]
        for number, exchange in enumerate(row.exchanges):
            if not exchange.launch_seconds:
                continue
            launches = spans.launch_seconds(others, number)
            _exchange(made, timeline, row, number, launches)
    return made.take()


def _exchange(
    made: OperationEvents, timeline: RankTimeline, row: StepRow, number: int, launches: dict[int, list[float]]
) -> None:
    exchange = row.exchanges[number]
    names = _names(timeline, row.step, exchange.engine)
    for bucket in spans.bucket_spans(exchange):
        i = bucket.position
        name = f"{KIND}." + lane_name(f"bucket {i}", names[i] if i < len(names) else ())
        came = {rank: times[i] for rank, times in launches.items() if i < len(times)}
        all_there = min(max([bucket.launch_seconds, *came.values()]), bucket.end_seconds)
        made.submitted(name, KIND, bucket.launch_seconds)
        for rank, at in sorted(came.items(), key=lambda item: item[1]):
            made.rank_ready(name, rank, min(max(at, bucket.launch_seconds), all_there))
        made.begun(name, KIND, all_there)
        begin = max(bucket.begin_seconds, all_there)
        if begin > all_there:
            made.activity([name], QUEUE, all_there, begin)
        made.activity([name], CARRIED, begin, bucket.end_seconds)
        made.finished(name, "", (), bucket.end_seconds, "")
    whole = lane_name("gradients", [name for bucket in names for name in bucket])
    made.begun(whole, KIND, min(exchange.launch_seconds))
    made.activity([whole], WAIT, exchange.wait_begin_seconds, exchange.wait_end_seconds)
    made.finished(whole, "", (), exchange.wait_end_seconds, "")


def _names(timeline: RankTimeline, step: int, engine: int) -> list[tuple[str, ...]]:
    """Return the parameters of each bucket at a step; nothing where the records do not say."""
    found = [layout for first, layout in timeline.layouts if first <= step and layout.engine == engine]
    return [bucket.parameters for bucket in found[-1].buckets] if found else []
