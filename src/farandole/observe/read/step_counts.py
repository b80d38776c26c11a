"""Counts over all steps of a rank, also those without a row: lengths, and pauses, which are rare or small."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from ...core.vocabulary.events import OTHER, PIPELINE_WAIT, STEP_PHASES
from ..format.phases import step_seconds
from ..format.rows import StepRow, ThinnedRow

LENGTHS_KEPT = 200_000
PAUSES_KEPT = 20_000


@dataclass
class StepCounts:
    """Sums and lists over the steps of one rank, in bounded memory."""

    lengths: array[float] = field(default_factory=lambda: array("d"))
    """Seconds of each step in `numbers`."""
    numbers: array[int] = field(default_factory=lambda: array("q"))
    pauses: dict[str, dict[int, float]] = field(default_factory=dict)
    """By name: step and seconds, of steps with a pause."""
    thinned_pauses: dict[str, float] = field(default_factory=dict)
    """By name: seconds in steps without a row of their own."""

    def take(self, row: StepRow | ThinnedRow) -> None:
        """Count one more row."""
        if isinstance(row, StepRow):
            self._take_step(row)
            return
        for name, seconds in row.seconds.items():
            if _is_pause(name):
                self.thinned_pauses[name] = self.thinned_pauses.get(name, 0.0) + seconds

    def _take_step(self, row: StepRow) -> None:
        if len(self.lengths) < LENGTHS_KEPT:
            self.lengths.append(row.end_seconds - row.begin_seconds)
            self.numbers.append(row.step)
        if all(phase.name in STEP_PHASES for phase in row.phases) and not row.more_seconds:
            return
        for name, seconds in step_seconds(row).items():
            if _is_pause(name) and seconds > 0:
                by_step = self.pauses.setdefault(name, {})
                if len(by_step) < PAUSES_KEPT:
                    by_step[row.step] = seconds


def _is_pause(name: str) -> bool:
    return name not in STEP_PHASES and name not in (OTHER, PIPELINE_WAIT)
