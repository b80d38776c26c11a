"""Writing the events of one rank to disk while it trains. Format: `docs/notes/records.md`.

The first line says whose events they are and in which version; each further line is one step or another
record (`rows`).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ...core.vocabulary.events import (
    EVENTS_VERSION,
    BucketLayout,
    ClockOffset,
    DevicePhases,
    Event,
    Sample,
    Setup,
    Started,
    Traffic,
)
from ...core.vocabulary.run_files import events_path
from ..format import rows
from ..format.line_file import BOUND_BYTES, Downsampler, LineFile
from ..format.rows import StepRow, ThinnedRow
from .step_builder import StepBuilder


class EventWriter:
    """Records one rank's events in the run directory. A `core.events.Recorder`.

    The file stays below about `bound_bytes`: of a long run, rows are left out (`thinning`).
    """

    def __init__(self, run_directory: Path, rank: int, *, bound_bytes: int = BOUND_BYTES) -> None:
        self._lines = LineFile(events_path(run_directory, rank))
        self._builder = StepBuilder()
        self._thinning = Downsampler(bound_bytes)

    def record(self, event: Event) -> None:
        """Take one event."""
        if isinstance(event, Started):
            self._lines.write({"version": EVENTS_VERSION, **dataclasses.asdict(event)})
        elif isinstance(event, Sample):
            if self._thinning.takes_sample(self._lines.written_bytes):
                self._lines.write(rows.encode_sample(event))
        elif isinstance(event, Traffic):
            if self._thinning.takes_sample(self._lines.written_bytes):
                self._lines.write(rows.encode_traffic(event))
        elif isinstance(event, Setup):
            self._lines.write(rows.encode_setup(event))
        elif isinstance(event, ClockOffset):
            self._lines.write(rows.encode_clock(event))
        elif isinstance(event, BucketLayout):
            self._write(self._thinning.close())
            self._lines.write(rows.encode_layout(event))
        elif isinstance(event, DevicePhases) and self._thinning.level(self._lines.written_bytes) == 0:
            self._lines.write(rows.encode_device_phases(event))
        row = self._builder.take(event)
        if row is not None:
            self._write(self._thinning.take_step(row, self._lines.written_bytes))

    def _write(self, kept: list[StepRow | ThinnedRow]) -> None:
        for row in kept:
            self._lines.write(rows.encode_step(row) if isinstance(row, StepRow) else rows.encode_thinned(row))

    def close(self) -> None:
        """Write the rows that are not written yet."""
        self._write(self._thinning.close())
        self._lines.close()
