"""All ranks as one trace that Perfetto and chrome://tracing show: a process a rank, one clock.

Besides the lanes of `spans`: arrows from the rank that launched its last bucket last to those that waited for
it, and counters of loss and host facts.

[Note: nothing is number 0] Perfetto takes process and thread 0 for the kernel's idle task, and shows it so.
Here rank 0 is process 1, and lanes count from 1; names and order are those of the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...core.vocabulary.events import Sample
from ..figures.figures import split_wait
from ..read.timeline_reader import RankTimeline
from . import spans
from .output import write_trace
from .source import ExportSource, rows_by_step
from .spans import PHASES, STEPS, Span

Event = dict[str, Any]
_LANES = {STEPS: 1, PHASES: 2}
_FIRST_NETWORK = 3
ARROW_SECONDS = 0.0005
ARROW_SHARE = 0.02
"""A wait for another rank gets an arrow when it is longer than both: this, and this share of the step."""


def write_chrome(records: ExportSource, out: Path) -> list[Path]:
    """Write the trace to `out` (compressed when it ends with ``.gz``); return what was written."""
    head = {
        "displayTimeUnit": "ms",
        "otherData": {
            "run": records.name,
            "ranks": records.size,
            "start_time_since_epoch_in_micros": round(records.epoch_seconds * 1e6),
            "notes": records.notes,
        },
    }
    return [write_trace(out, head, trace_events(records))]


def trace_events(records: ExportSource) -> Iterator[Event]:
    """Yield the events: of each rank its name, its spans and its counters; then the arrows between ranks."""
    for timeline in records.timelines:
        zero = records.zero_of(timeline)
        yield from _named(timeline, has_own_clock=timeline.started.rank in records.incomparable)
        yield from _spans(timeline, zero)
        yield from _counters(timeline, zero)
    yield from _arrows(records)


def _named(timeline: RankTimeline, *, has_own_clock: bool) -> Iterator[Event]:
    started = timeline.started
    name = f"rank {started.rank} on {started.host}" + (" (its own clock)" if has_own_clock else "")
    yield {"ph": "M", "name": "process_name", "pid": _process(started.rank), "args": {"name": name}}
    yield {
        "ph": "M",
        "name": "process_sort_index",
        "pid": _process(started.rank),
        "args": {"sort_index": started.rank},
    }


def _spans(timeline: RankTimeline, zero: float) -> Iterator[Event]:
    process, named = _process(timeline.started.rank), set[int]()
    for span in _all_spans(timeline):
        lane = _lane(span.lane)
        if lane not in named:
            named.add(lane)
            yield {"ph": "M", "name": "thread_name", "pid": process, "tid": lane, "args": {"name": span.lane}}
            yield {
                "ph": "M",
                "name": "thread_sort_index",
                "pid": process,
                "tid": lane,
                "args": {"sort_index": lane},
            }
        yield {
            "ph": "X",
            "name": span.name,
            "cat": span.lane.split()[0],
            "pid": process,
            "tid": lane,
            "ts": micros(span.begin_seconds - zero),
            "dur": micros(max(0.0, span.end_seconds - span.begin_seconds)),
            "args": _finite(span.args),
        }


def _all_spans(timeline: RankTimeline) -> Iterator[Span]:
    for row in timeline.steps:
        yield spans.step_span(row)
        yield from spans.phase_spans(row)
    yield from spans.network_spans(timeline)


def _process(rank: int) -> int:
    """Return the number of a rank's process. See [Note: nothing is number 0]."""
    return rank + 1


def _lane(name: str) -> int:
    known = _LANES.get(name)
    return _FIRST_NETWORK + int(name.rpartition(" ")[2]) if known is None else known


def _counters(timeline: RankTimeline, zero: float) -> Iterator[Event]:
    rank = timeline.started.rank
    for row in timeline.steps:
        if row.loss is not None and math.isfinite(row.loss):
            yield _counter(rank, "loss", row.end_seconds - zero, {"loss": row.loss})
    for sample in timeline.samples:
        for name, values in _sampled(sample).items():
            yield _counter(rank, name, sample.at_seconds - zero, values)


def _sampled(sample: Sample) -> dict[str, dict[str, float]]:
    mebibyte = 2**20
    found: dict[str, dict[str, float | None]] = {
        "CPU (cores)": {"process": sample.process_cores},
        "machine (share)": {"busy": sample.machine_share},
        "memory (MiB)": {"resident": _divided(sample.resident_bytes, mebibyte)},
        "accelerator (share)": {"busy": sample.gpu_share},
        "accelerator memory (MiB)": {"used": _divided(sample.gpu_used_bytes, mebibyte)},
    }
    known = {name: {key: v for key, v in values.items() if v is not None} for name, values in found.items()}
    return {name: values for name, values in known.items() if values}


def _divided(value: int | None, by: int) -> float | None:
    return None if value is None else value / by


def _counter(rank: int, name: str, at: float, values: Mapping[str, float]) -> Event:
    return {"ph": "C", "name": name, "pid": _process(rank), "ts": micros(at), "args": dict(values)}


def _arrows(records: ExportSource) -> Iterator[Event]:
    """From the last launch of the last rank to the end of the wait of each that waited for it."""
    timelines = [t for t in records.timelines if t.started.rank not in records.incomparable]
    zero, number = records.begin_seconds, 0
    for step, rows in rows_by_step(timelines).items():
        for i in range(max(len(row.exchanges) for _, row in rows)):
            launches = {rank: max(times) for rank, times in spans.launch_seconds(rows, i).items()}
            if len(launches) <= 1:
                continue
            last = max(launches, key=lambda rank: launches[rank])
            for rank, row in rows:
                if rank == last or rank not in launches:
                    continue
                begin, end = row.exchanges[i].wait_begin_seconds, row.exchanges[i].wait_end_seconds
                waited, _ = split_wait(begin, end, launches[last])
                if waited > max(ARROW_SECONDS, ARROW_SHARE * (row.end_seconds - row.begin_seconds)):
                    number += 1
                    name = f"rank {rank} waited {waited * 1e3:.1f} ms for rank {last}"
                    yield from _arrow(number, name, step, (last, launches[last] - zero), (rank, end - zero))


def _arrow(
    number: int, name: str, step: int, source: tuple[int, float], target: tuple[int, float]
) -> Iterable[Event]:
    common = {"name": name, "cat": "waiting", "id": number, "tid": _LANES[STEPS], "args": {"step": step}}
    yield {**common, "ph": "s", "pid": _process(source[0]), "ts": micros(source[1])}
    # Ends inside the step, not on its border, where it would belong to the next one.
    yield {
        **common,
        "ph": "f",
        "bp": "e",
        "pid": _process(target[0]),
        "ts": micros(max(source[1], target[1] - 1e-6)),
    }


def _finite(args: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in args.items()}


def micros(seconds: float) -> float:
    """Return microseconds with nanoseconds behind the point, as viewers take them."""
    return round(seconds * 1e6, 3)
