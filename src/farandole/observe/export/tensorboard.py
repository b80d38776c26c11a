"""Scalars for TensorBoard, by its own package: a folder with ``all`` and one ``rank<r>`` a rank.

``all`` has loss, throughput, the slowest rank's step and its parts; a rank's own has its step by phase and its
host's facts.
"""

from __future__ import annotations

import bisect
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from ...core.vocabulary.errors import ConfigError
from ..figures.figures import throughput
from ..figures.step_parts import rows_of, shares_of, step_parts
from ..figures.summary import weighted_loss
from ..records.rows import StepRow, step_seconds
from ..records.timeline_reader import RankTimeline
from .source import ExportSource, needed, rows_by_step, write_output

_T = TypeVar("_T")
STEPS_SHOWN = 10_000
"""Most steps; longer runs give every k-th step, which TensorBoard thins further."""
_HOST = {
    "process_cores": "host/process cores", "machine_share": "host/machine busy share",
    "resident_bytes": "host/resident bytes", "gpu_share": "host/accelerator busy share",
    "gpu_used_bytes": "host/accelerator bytes",
}  # fmt: skip


def write_tensorboard(records: ExportSource, out: Path) -> list[Path]:
    """Write the folder `out`; return the files written."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is no folder: this format is one folder a rank", remedy="choose one with -o OUT")
    wall = records.epoch_seconds
    name = f"events.out.tfevents.{int(wall)}.farandole"
    written = [write_output(out / "all" / name, _file_of(wall, _all_events(records)))]
    for timeline in records.timelines:
        events = _rank_events(timeline, wall - records.zero_of(timeline))
        written.append(write_output(out / f"rank{timeline.started.rank}" / name, _file_of(wall, events)))
    return written


def _file_of(wall_seconds: float, events: Iterable[Any]) -> Iterator[bytes]:
    """Yield the pieces of an event file: its version, then the events."""
    records = needed("tensorboard.summary.writer.record_writer", "tensorboard")
    for event in chain([_event(wall_seconds, file_version="brain.Event:2")], events):
        piece = io.BytesIO()
        records.RecordWriter(piece).write(event.SerializeToString())
        yield piece.getvalue()


def _event(wall_seconds: float, **facts: Any) -> Any:
    made = needed("tensorboard.compat.proto.event_pb2", "tensorboard")
    return made.Event(wall_time=wall_seconds, **facts)


def _scalars(wall_seconds: float, step: int, values: Iterable[tuple[str, float]]) -> Any:
    """Return one event with the values by tag; TensorBoard has no NaN or infinity."""
    known = [{"tag": tag, "simple_value": value} for tag, value in values if math.isfinite(value)]
    return _event(wall_seconds, step=step, summary={"value": known})


def _all_events(records: ExportSource) -> Iterator[Any]:
    wall = records.epoch_seconds - records.begin_seconds
    parts = {
        (timeline.started.rank, part.step): part
        for timeline, own in zip(records.timelines, step_parts(records.timelines), strict=True)
        for part in own
    }
    by_step = rows_by_step(records.timelines)
    for step in _thin(list(by_step)):
        rows = by_step[step]
        own = [parts[rank, step] for rank, _ in rows]
        values = [
            *_rates([row for _, row in rows]),
            ("step/seconds of the slowest rank", max(p.seconds for p in own)),
        ]
        if any(part.seconds > 0 for part in own):
            values += [(f"share/{name}", share) for name, share in shares_of(own).items()]
        yield _scalars(wall + rows[0][1].end_seconds, step, values)


def _rates(rows: Sequence[StepRow]) -> list[tuple[str, float]]:
    seconds = max(row.end_seconds - row.begin_seconds for row in rows)
    losses = [(row.loss, row.samples) for row in rows if row.loss is not None]
    values = [("loss", weighted_loss(losses))] if losses else []
    samples, tokens = sum(row.samples for row in rows), sum(row.tokens or 0 for row in rows)
    if samples:
        values.append(("throughput/samples per second", throughput(samples, seconds)))
    if tokens:
        values.append(("throughput/tokens per second", throughput(tokens, seconds)))
    return values


def _rank_events(timeline: RankTimeline, wall: float) -> Iterator[Any]:
    for row in _thin(rows_of(timeline)):
        values = [("step/seconds", row.end_seconds - row.begin_seconds)]
        values += [(f"phase/{name} seconds", seconds) for name, seconds in step_seconds(row).items()]
        if row.loss is not None:
            values.append(("loss", row.loss))
        yield _scalars(wall + row.end_seconds, row.step, values)
    ends = [row.end_seconds for row in timeline.steps]
    for sample in _thin(timeline.samples):
        if not ends:
            return
        step = timeline.steps[min(bisect.bisect_left(ends, sample.at_seconds), len(ends) - 1)].step
        known = [(tag, getattr(sample, name)) for name, tag in _HOST.items()]
        yield _scalars(wall + sample.at_seconds, step, [(tag, value) for tag, value in known if value is not None])


def _thin(values: Sequence[_T]) -> Sequence[_T]:
    return values[:: -(-len(values) // STEPS_SHOWN)] if values else values
