"""What an accelerator did and when: events in its stream, read when they have passed. Never waits for it.

The host queues work and runs ahead, so the times of its own hooks say when work was queued. A mark is an event
recorded in the stream at the same place; steps later its time is known without waiting. Device times become
times of the host's clock by an anchor: one event after a synchronisation when the marks are made (before
training, the only one), and from then on the device's own measure of the time since. The anchor moves with the
steps, because the device tells long times in few digits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from ...comm.device.accelerator import is_accelerator, memory_of, synchronize, timing_event, unique_id
from ...comm.world.world import World, has_world, world
from ...core.vocabulary.events import DevicePhases, Phase
from ...observe.records.host_sampler import AcceleratorFigures, find_gpu

STEPS_KEPT = 64
"""Steps whose events may be waiting; older ones are dropped, as a device that is so far behind has stopped."""
PHASES_KEPT = 256


class StreamEvent(Protocol):
    """What is used of an event that keeps times."""

    def record(self) -> None:
        """Put it into the current stream."""

    def query(self) -> bool:
        """Return whether the device has passed it."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return milliseconds from here to `end_event`; both have passed."""


class DeviceMarks:
    """The marks of one rank's device."""

    def __init__(self, make: Callable[[], StreamEvent], synchronize: Callable[[], None]) -> None:
        self._make = make
        self._anchor = make()
        self._anchor.record()
        synchronize()
        self._anchor_seconds = time.monotonic()
        self._open: dict[str, StreamEvent] = {}
        self._marks: list[tuple[str, StreamEvent, StreamEvent]] = []
        self._waiting: deque[tuple[int, list[tuple[str, StreamEvent, StreamEvent]]]] = deque()

    def begin(self, name: str) -> None:
        """What is queued from now on belongs to `name`."""
        if len(self._marks) < PHASES_KEPT:
            event = self._open[name] = self._make()
            event.record()

    def end(self, name: str, called: str) -> None:
        """It has been queued; it is to be `called` so."""
        begin = self._open.pop(name, None)
        if begin is not None:
            end = self._make()
            end.record()
            self._marks.append((called, begin, end))

    def step_done(self, step: int) -> list[DevicePhases]:
        """Close the marks of a step; return those of the steps that the device has passed."""
        if self._marks:
            self._waiting.append((step, self._marks))
            self._marks = []
        passed = []
        while self._waiting and self._waiting[0][1][-1][2].query():
            number, marks = self._waiting.popleft()
            passed.append(DevicePhases(number, tuple(self._phase(*mark) for mark in marks)))
            last = marks[-1][2]
            self._anchor_seconds, self._anchor = self._at(last), last
        while len(self._waiting) > STEPS_KEPT:
            self._waiting.popleft()
        return passed

    def _phase(self, name: str, begin: StreamEvent, end: StreamEvent) -> Phase:
        return Phase(name, self._at(begin), self._at(end))

    def _at(self, event: StreamEvent) -> float:
        return self._anchor_seconds + self._anchor.elapsed_time(event) / 1e3


def device_marks(here: World) -> DeviceMarks | None:
    """Return the marks of this rank's device, made at the first call; None on a CPU."""
    if not is_accelerator(here.device):
        return None
    return here.session.keep(DeviceMarks, partial(_make_marks, here))


def _make_marks(here: World) -> DeviceMarks:
    marks = DeviceMarks(partial(timing_event, here.device), partial(synchronize, here.device))
    here.session.steps.after_step(_StepEnd(marks, here))
    return marks


class _StepEnd:
    def __init__(self, marks: DeviceMarks, here: World) -> None:
        self._marks = marks
        self._here = here

    def __call__(self, step: int) -> None:
        for event in self._marks.step_done(step):
            self._here.session.recorder.record(event)


def mark_begin(name: str) -> None:
    """Mark the begin of a phase on the device, where there is one."""
    if has_world() and (marks := device_marks(world())) is not None:
        marks.begin(name)


def mark_end(name: str, called: str | None = None) -> None:
    """Mark the end of the phase that was begun as `name`, and is `called` otherwise."""
    if has_world() and (marks := device_marks(world())) is not None:
        marks.end(name, called or name)


# How busy this rank's accelerator is and what memory it has left, for the samples of a run.
#
# NVML says both (nvidia-ml-py). Without it, or where it does not know the device, torch says the memory.


class MemoryFigures:
    """See `AcceleratorFigures`: the memory, as torch says it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> tuple[float | None, int | None, int | None]:
        """See `AcceleratorFigures`; the host does not wait for the device."""
        memory = memory_of(self._device)
        return (None, None, None) if memory is None else (None, memory.total - memory.free, memory.total)

    def close(self) -> None:
        """See `AcceleratorFigures`."""


def figures_of(here: World) -> AcceleratorFigures | None:
    """Return what tells of this rank's accelerator; None for a CPU, and a kind that says nothing."""
    name = unique_id(here.device)
    found = find_gpu(name) if name else None
    if found is not None:
        return found
    return None if memory_of(here.device) is None else MemoryFigures(here.device)
