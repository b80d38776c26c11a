"""What an export starts from: the records of a run, all ranks on one clock, with the wall time of its zero."""

from __future__ import annotations

import dataclasses
import importlib
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ...core.vocabulary.errors import ConfigError, DataError
from ...core.vocabulary.run_files import write_asked
from ...core.vocabulary.text import install_command
from ..records.rows import StepRow
from ..records.run_reader import RunRecords, note_killed, read_run
from ..records.timeline_reader import RankTimeline


@dataclass
class ExportSource(RunRecords):
    """A run as exports read it: with the time that traces call zero."""

    @property
    def begin_seconds(self) -> float:
        """The earliest time of any rank on the common clock: the zero of traces."""
        return min(self._begin(timeline) for timeline in self.timelines if self._counts(timeline))

    @property
    def epoch_seconds(self) -> float:
        """The wall time of `begin_seconds`, seconds since 1970; 0 where no rank says it."""
        for timeline in self.timelines:
            if self._counts(timeline) and (wall := wall_seconds(timeline.started.wall_time)):
                return wall + self.begin_seconds - timeline.started.begin_seconds
        return 0.0

    def zero_of(self, timeline: RankTimeline) -> float:
        """Return the time of a rank's clock that traces call zero; a rank apart begins at its own."""
        return self.begin_seconds if self._counts(timeline) else self._begin(timeline)

    def _counts(self, timeline: RankTimeline) -> bool:
        return timeline.started.rank not in self.incomparable or len(self.incomparable) == len(self.timelines)

    @staticmethod
    def _begin(timeline: RankTimeline) -> float:
        begin = timeline.started.begin_seconds
        return min(begin, timeline.steps[0].begin_seconds) if timeline.steps else begin


def load(run_directory: Path, steps: tuple[int, int] | None = None) -> ExportSource:
    """Read a run; with `steps`, only those of this range.

    The steps of a long run are a uniform sample, as `RunRecords.notes` say; requested steps are complete. Raises
    `DataError` when there is no such run or nothing in it can be read, `ConfigError` when it has none of
    the steps asked for.
    """
    records = read_run(run_directory, steps=steps)
    notes = [*records.notes, *note_killed(run_directory, time.time())]
    if not records.timelines:
        reasons = "; ".join(notes[:3]) or "there are no events-rank*.jsonl"
        raise DataError(
            f"{run_directory} has no records to export: {reasons}", remedy="name a directory below runs/"
        )
    timelines = records.timelines
    if steps is not None:
        timelines = [_only(timeline, *steps) for timeline in timelines]
    if not any(timeline.steps for timeline in timelines):
        if steps is not None:
            _refuse_steps(run_directory, steps)
        raise DataError(
            f"{run_directory} has no steps to export: the script did not train, or ended before its first step"
        )
    notes += _sampled(timelines)
    return ExportSource(
        run_directory, records.facts, records.size, timelines, records.incomparable, records.clock_error_seconds,
        notes, records.missing,
    )  # fmt: skip


def _refuse_steps(run_directory: Path, steps: tuple[int, int]) -> None:
    """Say which steps there are; nothing if there are none."""
    known = [row.step for timeline in read_run(run_directory).timelines for row in timeline.steps]
    if known:
        raise ConfigError(
            f"--steps {steps[0]}-{steps[1]}: the run has rows of steps {min(known)} to {max(known)}",
            remedy="choose among those",
        )


def _sampled(timelines: Sequence[RankTimeline]) -> list[str]:
    """Say which part of a long run is not exported."""
    worst = max(timelines, key=lambda timeline: timeline.step_count - len(timeline.steps))
    if not worst.halvings:
        return []
    return [
        f"the run is long: {len(worst.steps)} of the {worst.step_count} steps of rank {worst.started.rank} are "
        f"exported one by one, chosen evenly; --steps A-B exports all of a stretch"
    ]


def _only(timeline: RankTimeline, first: int, last: int) -> RankTimeline:
    rows = [row for row in timeline.steps if first <= row.step <= last]
    begin = rows[0].begin_seconds if rows else timeline.started.begin_seconds
    end = rows[-1].end_seconds if rows else begin
    wall = wall_seconds(timeline.started.wall_time)
    moved = wall + begin - timeline.started.begin_seconds
    later = datetime.fromtimestamp(moved, timezone.utc).isoformat() if wall else ""
    return dataclasses.replace(
        timeline,
        started=dataclasses.replace(timeline.started, begin_seconds=begin, wall_time=later),
        steps=rows,
        thinned=[],
        samples=[sample for sample in timeline.samples if begin <= sample.at_seconds <= end],
    )


def rows_by_step(timelines: Sequence[RankTimeline]) -> dict[int, list[tuple[int, StepRow]]]:
    """Return for each step the rows of the ranks that have one, as (rank, row)."""
    found: dict[int, list[tuple[int, StepRow]]] = {}
    for timeline in timelines:
        for row in timeline.steps:
            found.setdefault(row.step, []).append((timeline.started.rank, row))
    return dict(sorted(found.items()))


def wall_seconds(text: str) -> float:
    """Return seconds since 1970 of an ISO 8601 time, taken as UTC where it says no zone; 0 when it is none."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return 0.0
    return (time if time.tzinfo else time.replace(tzinfo=timezone.utc)).timestamp()


# Files of the formats, and the packages that write some of them.


def write_output(path: Path, pieces: Iterable[bytes]) -> Path:
    """Write a private file, through gzip when its name ends with ``.gz``; return its path.

    Raises `ConfigError` when it cannot be written; nothing is left behind then.
    """
    packed = _packed(pieces) if path.suffix == ".gz" else pieces
    write_asked(path, packed, remedy="choose another place with -o OUT")
    return path


def _packed(pieces: Iterable[bytes]) -> Iterator[bytes]:
    packer = zlib.compressobj(zlib.Z_BEST_COMPRESSION, wbits=31)  # 31: gzip's header
    yield from map(packer.compress, pieces)
    yield packer.flush()


def needed(module: str, extra: str) -> Any:
    """Import `module`, of this package's extra `extra`. Raises ConfigError, which names that, if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as problem:
        raise ConfigError(
            f"this format needs {module.partition('.')[0]}, which cannot be imported ({problem})",
            remedy=f"install it with: {install_command(extra)}",
        ) from None
