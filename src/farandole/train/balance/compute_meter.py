"""How long this rank computes for one sample, by the events that it records anyway.

[Note: compute without waiting] A rank that waits for the others looks slow if its waiting counts. So a step's
computing is all of it but what is known to be something else: waiting for data (a slow loader is no slow rank),
for gradients and other exchanges, evaluation and checkpoints. Times are of the host: on accelerators they say
when work was queued.
"""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

from ...core.vocabulary.events import (
    CHECKPOINT,
    END_OF_EPOCH,
    EVALUATION,
    DataWait,
    Event,
    Exchange,
    InnerExchange,
    Phase,
    Recorder,
    StepDone,
)

_PAUSES = (EVALUATION, CHECKPOINT, END_OF_EPOCH)


class ComputeTimes(NamedTuple):
    """Medians of a window of steps, in seconds; all 0 where steps have no samples of a known number."""

    sample_seconds: float
    compute_seconds: float
    step_seconds: float
    samples: float


class ComputeMeter:
    """A recorder that measures, and passes every event on. See [Note: compute without waiting]."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._begin_seconds: float | None = None
        self._end_seconds = 0.0
        self._other_seconds = 0.0
        self._samples = 0
        self._steps: list[tuple[float, float, int]] = []
        """Computing, length and samples of each step."""

    def record(self, event: Event) -> None:
        """Take one event."""
        self._recorder.record(event)
        if isinstance(event, Exchange):
            self._other_seconds += event.wait_end_seconds - event.wait_begin_seconds
        elif isinstance(event, DataWait):
            self._samples += event.samples
            self._other_seconds += event.end_seconds - event.begin_seconds
        elif isinstance(event, InnerExchange) or (isinstance(event, Phase) and event.name in _PAUSES):
            self._other_seconds += event.end_seconds - event.begin_seconds
        elif isinstance(event, StepDone):
            self._end_seconds = event.end_seconds

    def step_ends(self) -> None:
        """Close a step: `StepDone` was recorded. What happens until `step_begins` is in no step."""
        if self._begin_seconds is not None:
            length = self._end_seconds - self._begin_seconds
            self._steps.append((length - self._other_seconds, length, self._samples))

    def step_begins(self) -> None:
        """Begin the next step."""
        self._begin_seconds = time.monotonic()
        self._other_seconds, self._samples = 0.0, 0

    def take(self) -> ComputeTimes:
        """Return what was measured since the last call."""
        steps, self._steps = [each for each in self._steps if each[2] > 0 and each[0] > 0], []
        if not steps:
            return ComputeTimes(0.0, 0.0, 0.0, 0.0)
        per_sample = statistics.median(compute / samples for compute, _, samples in steps)
        compute, length = (statistics.median(each[i] for each in steps) for i in (0, 1))
        return ComputeTimes(per_sample, compute, length, statistics.median_low(each[2] for each in steps))
