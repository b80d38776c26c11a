"""Times of an accelerator, with a pretended one: read when they have passed, and never waited for."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest

from farandole.parallel.instrument.device_marks import STEPS_KEPT, DeviceMarks


@dataclass
class Device:
    """Runs what is queued when told, on a clock of its own in milliseconds."""

    now_ms: float = 0.0
    queue: list[Event] = field(default_factory=list)
    waits: int = 0

    def make(self) -> Event:
        return Event(self)

    def run(self, *durations_ms: float) -> None:
        for duration in durations_ms:
            self.now_ms += duration
            self.queue.pop(0).at_ms = self.now_ms

    def synchronize(self) -> None:
        self.waits += 1
        self.run(*[0.0] * len(self.queue))


@dataclass
class Event:
    device: Device
    at_ms: float | None = None

    def record(self) -> None:
        self.device.queue.append(self)

    def query(self) -> bool:
        return self.at_ms is not None

    def elapsed_time(self, end_event: Event) -> float:
        assert self.at_ms is not None, "asked before it passed"
        assert end_event.at_ms is not None, "asked before it passed"
        return end_event.at_ms - self.at_ms


def test_steps_come_when_the_device_has_passed_them() -> None:
    device = Device(now_ms=5.0)
    zero = time.monotonic()
    marks = DeviceMarks(device.make, device.synchronize)
    for _ in range(2):
        marks.begin("forward")
        marks.end("forward", "forward")
        marks.begin("backward")
        marks.end("backward", "backward")
        assert marks.step_done(1) == []
    device.run(10.0, 20.0, 5.0, 40.0, 1.0)
    (step,) = marks.step_done(3)
    forward, backward = step.phases
    assert (step.step, forward.name, backward.name) == (1, "forward", "backward")
    assert forward.begin_seconds - zero == pytest.approx(0.010, abs=0.005)
    assert forward.end_seconds - forward.begin_seconds == pytest.approx(0.020)
    assert backward.begin_seconds - forward.end_seconds == pytest.approx(0.005)
    device.run(2.0, 3.0, 4.0)
    (step,) = marks.step_done(4)
    assert step.phases[0].begin_seconds - backward.end_seconds == pytest.approx(0.001)  # over a moved anchor
    assert device.waits == 1


def test_a_device_that_stands_still_costs_no_memory() -> None:
    device = Device()
    marks = DeviceMarks(device.make, device.synchronize)
    for step in range(STEPS_KEPT + 100):
        marks.begin("forward")
        marks.end("forward", "forward")
        marks.end("never begun", "x")
        assert marks.step_done(step) == []
    assert len(marks._waiting) == STEPS_KEPT
