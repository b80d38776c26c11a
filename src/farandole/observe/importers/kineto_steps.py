"""Steps with phases and exchanges, of what `kineto_events.KinetoEvents` kept.

Steps are ``ProfilerStep#N`` where the script called ``profiler.step()``, else they end with each
``Optimizer.step#``; else the whole trace is one. Forward is what the CPU does between the batch and
backward.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ...core.vocabulary.events import BACKWARD, DATA, FORWARD, OPTIMIZER, BucketTimes, Exchange, Phase
from .foreign_rank import ForeignStep
from .kineto_events import Collective, KinetoEvents, Spans

Bounds = tuple[int, float, float]
"""(step, begin, end)."""


@dataclass
class _Step:
    """What began in a step."""

    step: int
    begin: float
    end: float
    loading: list[tuple[float, float]] = field(default_factory=list)
    optimizing: list[tuple[float, float]] = field(default_factory=list)
    zeroing: list[tuple[float, float]] = field(default_factory=list)
    launches: list[float] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    backward_begin: float = float("inf")
    backward_end: float = float("-inf")
    forward_from: float = 0.0
    forward_until: float = 0.0
    forward_begin: float = float("inf")
    exchange_end: float = float("-inf")
    busy_until: float = float("-inf")
    """When the last other kernel ends that began before the exchange's end."""


def bounds_of(events: KinetoEvents, name: str) -> tuple[list[Bounds], list[str]]:
    """Return the steps, touching, and notes about the file of this `name`."""
    if events.marks:
        marks = sorted(events.marks, key=lambda mark: mark[1])
        # A step lasts until the next one begins: what the profiler does between belongs to it.
        ends = [following[1] for following in marks[1:]] + [marks[-1][2]]
        return [(number + 1, begin, end) for (number, begin, _), end in zip(marks, ends, strict=True)], []
    stops = sorted(end for _, end in events.optimizing)
    if stops:
        starts = [events.begin_seconds, *stops[:-1]]
        note = f"{name}: no profiler.step(): steps end with Optimizer.step"
        return [(i + 1, a, b) for i, (a, b) in enumerate(zip(starts, stops, strict=True))], [note]
    note = f"{name}: neither profiler.step() nor an optimizer's step: the whole trace counts as one step"
    return [(1, events.begin_seconds, events.end_seconds)], [note]


def steps_of(events: KinetoEvents, bounds: Sequence[Bounds]) -> list[ForeignStep]:
    """Return each with what began in it."""
    steps = [_Step(*each) for each in bounds]
    starts = [step.begin for step in steps]

    def step_at(begin: float) -> _Step | None:
        found = bisect_right(starts, begin) - 1
        return steps[found] if found >= 0 and begin < steps[found].end else None

    _divide(events, step_at)
    for step in steps:
        _bound_forward(step)
    for begin in events.operations:
        own = step_at(begin)
        if own is not None and own.forward_from <= begin < own.forward_until:
            own.forward_begin = min(own.forward_begin, begin)
    for step in steps:
        _keep_kernels(step)
    for begin, end in events.kernels:
        own = step_at(begin)
        if own is not None and begin < own.exchange_end:
            own.busy_until = max(own.busy_until, end)
    return [_finished(step) for step in steps]


def _divide(events: KinetoEvents, step_at: Callable[[float], _Step | None]) -> None:
    """Give each step what began in it, in order of time."""

    def sort_into(spans: Spans, take: Callable[[_Step, tuple[float, float]], None]) -> None:
        for span in spans:
            own = step_at(span[0])
            if own is not None:
                take(own, span)

    sort_into(events.loading, lambda step, span: step.loading.append(span))
    sort_into(events.optimizing, lambda step, span: step.optimizing.append(span))
    sort_into(events.zeroing, lambda step, span: step.zeroing.append(span))
    for begin, end in events.differentiating:
        own = step_at(begin)
        if own is not None:
            own.backward_begin, own.backward_end = min(own.backward_begin, begin), max(own.backward_end, end)
    for begin in events.launches:
        own = step_at(begin)
        if own is not None:
            own.launches.append(begin)
    for collective in events.collectives:
        own = step_at(collective.begin_seconds)
        if own is not None:
            own.collectives.append(collective)


def _begins(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    return sorted(spans, key=lambda span: span[0])


def _bound_forward(step: _Step) -> None:
    """Set between what forward lies: from the batch (or the optimizer's last act) until backward begins."""
    others = [*step.loading, *step.optimizing]
    if step.backward_begin < float("inf"):
        stop = step.backward_begin
    else:
        stop = min((begin for begin, _ in step.optimizing), default=step.end)
    ends = [min(step.end, end) for _, end in others]
    start = max((end for end in ends if end <= stop), default=step.begin)
    zeroed = [end for begin, end in step.zeroing if start <= begin and end <= stop]
    step.forward_from, step.forward_until = max([start, *zeroed]), stop


def _keep_kernels(step: _Step) -> None:
    """Keep only the accelerator's collectives if there are any: those of the CPU are then their launches."""
    done = sorted(step.collectives, key=lambda collective: collective.begin_seconds)
    step.collectives = [collective for collective in done if collective.is_kernel] or done
    ends = (min(step.end, collective.end_seconds) for collective in step.collectives)
    step.exchange_end = max(ends, default=step.exchange_end)
    step.launches.sort()


def _finished(step: _Step) -> ForeignStep:
    end = step.end
    phases = [Phase(DATA, begin, min(end, to)) for begin, to in _begins(step.loading)]
    computing = []
    if step.forward_begin < float("inf"):
        computing.append(Phase(FORWARD, step.forward_begin, step.forward_until))
    if step.backward_begin < float("inf"):
        computing.append(Phase(BACKWARD, step.backward_begin, min(end, step.backward_end)))
    optimizer = [Phase(OPTIMIZER, begin, min(end, to)) for begin, to in _begins(step.optimizing)]
    phases = sorted([*phases, *computing, *optimizer], key=lambda phase: phase.end_seconds)
    return ForeignStep(step.step, step.begin, end, tuple(phases), _exchange(step, computing))


def _exchange(step: _Step, computing: Sequence[Phase]) -> tuple[Exchange, ...]:
    """Return the step's collectives as one exchange; the wait is what no computation covers at its end."""
    done = step.collectives
    if not done:
        return ()
    asked: Iterable[float] = step.launches
    if len(step.launches) != len(done):
        asked = (collective.begin_seconds for collective in done)
    buckets = tuple(
        BucketTimes(
            each.nbytes, 0, None, None, min(at, each.begin_seconds), each.begin_seconds,
            min(step.end, each.end_seconds),
        )
        for at, each in zip(asked, done, strict=True)
    )  # fmt: skip
    if done[0].is_kernel:
        busy = [step.busy_until] if step.busy_until > float("-inf") else []
    else:
        busy = [phase.end_seconds for phase in computing]
    begin = min(step.exchange_end, max(busy, default=buckets[0].launch_seconds))
    return (Exchange(tuple(bucket.launch_seconds for bucket in buckets), begin, step.exchange_end, 0, buckets),)
