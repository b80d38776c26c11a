"""The shape that HolisticTraceAnalysis reads: a folder with one trace a rank, as PyTorch's profiler writes them.

That tool counts kernels of an accelerator alone, by their stream, and takes for communication what is named as
NCCL's kernels are. So phases become kernels of one stream, buckets kernels of another, each with the call that
launched it; its temporal breakdown, overlap and idle times then speak of this run, whatever it ran on. Waiting
for data is not a kernel: it shows as idle.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.events import BACKWARD, COMPUTING, FORWARD, LOSS, OPTIMIZER
from ..format.rows import StepRow
from ..read.timeline_reader import RankTimeline
from . import spans
from .chrome import micros
from .output import write_trace
from .source import ExportSource

Event = dict[str, Any]
COMPUTE_STREAM = 7
NETWORK_STREAM = 20
COMMUNICATION = "ncclDevKernel_AllReduce"
"""The tool's expression for communication is ``nccl.*Kernel``."""
BUSY = (FORWARD, LOSS, BACKWARD, COMPUTING, OPTIMIZER, spans.COMPUTE)
_CPU_THREAD = 1
LAUNCH_SECONDS = 1e-6


def write_hta(records: ExportSource, out: Path) -> list[Path]:
    """Write ``rank<r>.pt.trace.json.gz`` of every rank into the folder `out`; return what was written."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is no folder: this format is one file a rank", remedy="choose one with -o OUT")
    return [
        write_trace(
            out / f"rank{timeline.started.rank}.pt.trace.json.gz",
            _head(records, timeline),
            rank_events(records, timeline),
        )
        for timeline in records.timelines
        if timeline.steps
    ]


def _head(records: ExportSource, timeline: RankTimeline) -> dict[str, Any]:
    return {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "nccl", "rank": timeline.started.rank, "world_size": records.size},
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": round(records.epoch_seconds * 1e9),
        "deviceProperties": [{"id": 0, "name": timeline.started.host}],
    }


def rank_events(records: ExportSource, timeline: RankTimeline) -> Iterator[Event]:
    """Yield the events of one rank."""
    zero, rank, correlation = records.zero_of(timeline), timeline.started.rank, 0
    named = {0: "compute", COMPUTE_STREAM: "stream 7 (phases)", NETWORK_STREAM: "stream 20 (buckets)"}
    yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "ts": 0, "args": {"name": f"rank {rank}"}}
    for thread, name in named.items():
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "ts": 0, "args": {"name": name}}
    for row in timeline.steps:
        yield {
            "ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{row.step}", "pid": rank,
            "tid": _CPU_THREAD, "ts": micros(row.begin_seconds - zero),
            "dur": micros(row.end_seconds - row.begin_seconds), "args": {},
        }  # fmt: skip
        for name, stream, launch, begin, end in _kernels(row):
            correlation += 1
            yield {
                "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": rank, "tid": _CPU_THREAD,
                "ts": micros(launch - zero), "dur": micros(LAUNCH_SECONDS),
                "args": {"correlation": correlation, "cbid": 211},
            }  # fmt: skip
            yield {
                "ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": micros(begin - zero),
                "dur": micros(end - begin),
                "args": {"stream": stream, "device": 0, "context": 1, "correlation": correlation},
            }  # fmt: skip


def _kernels(row: StepRow) -> Iterator[tuple[str, int, float, float, float]]:
    """Yield (name, stream, launch, begin, end) in order of begin."""
    found = [
        (span.name, COMPUTE_STREAM, span.begin_seconds, span.begin_seconds, span.end_seconds)
        for span in spans.phase_spans(row)
        if span.name in BUSY
    ]
    for exchange in row.exchanges:
        found += [
            (COMMUNICATION, NETWORK_STREAM, bucket.launch_seconds, bucket.begin_seconds, bucket.end_seconds)
            for bucket in spans.bucket_spans(exchange)
        ]
    # A stream runs one kernel after the other, as the tool takes for granted; buckets may travel together.
    free: dict[int, float] = {}
    for name, stream, launch, begin, end in sorted(found, key=lambda kernel: kernel[3]):
        start = max(begin, free.get(stream, begin))
        if end > start:
            free[stream] = end
            yield name, stream, launch, start, end
