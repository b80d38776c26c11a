"""Scalars and a figure for TensorBoard, by its own package: a folder with ``all`` and one ``rank<r>`` a rank.

``all`` has loss, throughput, the slowest rank's step and its parts, and a figure of where each rank's time went; a
rank's own has its step by phase and its host's facts.
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
from ...core.vocabulary.events import OTHER, STEP_PHASES
from ..figures.device_time import rows_of
from ..figures.figures import throughput
from ..figures.step_parts import shares_of, step_parts
from ..figures.summary import weighted_loss
from ..format.phases import step_seconds
from ..format.rows import StepRow
from ..read.timeline_reader import RankTimeline
from .metrics import phase_totals
from .output import needed, write_output
from .source import ExportSource, rows_by_step

_T = TypeVar("_T")
Colour = tuple[int, int, int]
STEPS_SHOWN = 10_000
"""Most steps; longer runs give every k-th step, which TensorBoard thins further."""
_HOST = {
    "process_cores": "host/process cores", "machine_share": "host/machine busy share",
    "resident_bytes": "host/resident bytes", "gpu_share": "host/accelerator busy share",
    "gpu_used_bytes": "host/accelerator bytes",
}  # fmt: skip
# Okabe and Ito's palette, which colour-blind people can tell apart.
COLOURS: dict[str, Colour] = {
    "data": (230, 159, 0), "forward": (86, 180, 233), "loss": (204, 121, 167), "backward": (0, 114, 178),
    "exchange": (213, 94, 0), "optimizer": (0, 158, 115), "other": (187, 187, 187),
}  # fmt: skip
_PAUSE: Colour = (90, 90, 90)
_INK: Colour = (51, 51, 51)
_BAR_WIDTH, _ROW = 560, 22
RANKS_DRAWN = 64


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
    last = max(by_step)
    picture, png = breakdown(records.timelines), io.BytesIO()
    picture.save(png, "PNG")
    image = {"width": picture.width, "height": picture.height, "colorspace": 3}
    value = {"tag": "time by phase and rank", "image": {**image, "encoded_image_string": png.getvalue()}}
    yield _event(wall + by_step[last][0][1].end_seconds, step=last, summary={"value": [value]})


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


def breakdown(timelines: Sequence[RankTimeline]) -> Any:
    """Draw a bar a rank, a `PIL.Image.Image`: mean seconds of a step by phase, longest as wide as it."""
    pillow = {name: needed(f"PIL.{name}", "tensorboard") for name in ("Image", "ImageDraw", "ImageFont")}
    shown = [timeline for timeline in timelines if timeline.step_count][:RANKS_DRAWN]
    means = [{k: v / timeline.step_count for k, v in phase_totals(timeline).items()} for timeline in shown]
    names = [name for name in (*STEP_PHASES, OTHER) if any(mean.get(name, 0) > 0 for mean in means)]
    pauses = [sum(v for k, v in mean.items() if k not in COLOURS) for mean in means]
    labels = [f"rank {timeline.started.rank}" for timeline in shown]
    font = pillow["ImageFont"].load_default()
    left = 16 + max((round(font.getlength(label)) for label in labels), default=0)
    longest = max((sum(mean.values()) for mean in means), default=0.0) or 1.0
    picture = pillow["Image"].new("RGB", (left + _BAR_WIDTH + 110, 40 + _ROW * len(shown) + 24), "white")
    draw = pillow["ImageDraw"].Draw(picture)

    def bar(begin: float, top: int, end: float, bottom: int, colour: Colour) -> None:
        if round(end) > round(begin):  # the last pixel is drawn too
            draw.rectangle((round(begin), top, round(end) - 1, bottom - 1), fill=colour)

    for i, (label, mean, pause) in enumerate(zip(labels, means, pauses, strict=True)):
        top, at = 40 + i * _ROW, float(left)
        draw.text((8, top + 2), label, fill=_INK, font=font)
        for colour, seconds in [*((COLOURS[name], mean.get(name, 0.0)) for name in names), (_PAUSE, pause)]:
            width = seconds / longest * _BAR_WIDTH
            bar(at, top, at + width, top + _ROW - 6, colour)
            at += width
        draw.text((at + 8, top + 2), f"{sum(mean.values()) * 1e3:.1f} ms", fill=_INK, font=font)
    at = 8
    for name, colour in [
        *((name, COLOURS[name]) for name in names),
        *([("pause", _PAUSE)] if any(pauses) else []),
    ]:
        bar(at, 12, at + 10, 22, colour)
        draw.text((at + 16, 11), name, fill=_INK, font=font)
        at += 32 + font.getlength(name)
    return picture
