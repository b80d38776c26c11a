"""A trace of PyTorch's profiler (Kineto) as steps with phases and exchanges.

Steps are ``ProfilerStep#N`` where the script called ``profiler.step()``, else they end with each
``Optimizer.step#``; else the whole trace is one. Phases are told by PyTorch's names: the loader's
``enumerate(DataLoader)``, autograd's ``evaluate_function``, ``Optimizer.step#``; forward is what the processor
does between. Collectives are what ran on the accelerator (``nccl...Kernel``) or in gloo's thread
(``gloo:all_reduce``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ...core.errors import DataError
from ...core.events import BACKWARD, DATA, FORWARD, OPTIMIZER, BucketTimes, Exchange, Phase
from .foreign_rank import ForeignRank, ForeignStep
from .trace_text import Trace, is_number

Event = dict[str, Any]
_STEP = re.compile(r"ProfilerStep#(\d+)")
_CPU = ("cpu_op", "user_annotation", "python_function")
_COLLECTIVE = re.compile(r"^(nccl(?!.*Broadcast).*Kernel|(gloo|nccl|mpi|ucc):(?!broadcast|barrier))")
_LAUNCH = re.compile(r"^c10d::(?!wait|barrier|broadcast)\w+")
_BYTES = {"Float": 4, "Half": 2, "BFloat16": 2, "Double": 8, "Int": 4, "Long": 8, "Byte": 1, "Char": 1, "Bool": 1}


def is_kineto(trace: Trace) -> bool:
    """Return whether the file has what the profiler writes: its head, or events of its categories."""
    known = {"schemaVersion", "distributedInfo", "deviceProperties", "record_shapes", "baseTimeNanoseconds"}
    return bool(known & set(trace.head)) or any(event.get("cat") in _CPU for event in trace.events[:10_000])


def read_kineto(trace: Trace, position: int) -> ForeignRank:
    """Read one rank's trace; one that does not say its rank has its position's.

    Raises `DataError` when nothing in it took time.
    """
    events = [e for e in trace.events if e.get("ph") == "X" and is_number(e.get("dur")) and "ts" in e]
    events.sort(key=lambda event: event["ts"])
    if not events:
        raise DataError(
            f"{trace.path} has no event that took time", remedy="was anything run inside the profiler?"
        )
    info = trace.head.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    rank, size = info.get("rank"), info.get("world_size")
    base = trace.head.get("baseTimeNanoseconds")
    bounds, notes = _bounds(trace, events)
    return ForeignRank(
        trace.path,
        rank if type(rank) is int and rank >= 0 else position,
        size if type(size) is int else None,
        str(trace.head.get("host_name") or info.get("host") or "unknown"),
        base / 1e9 if isinstance(base, int) and not isinstance(base, bool) else None,
        [_step(number, begin, end, events) for number, begin, end in bounds],
        (),
        notes,
    )


def _begin(event: Event) -> float:
    return float(event["ts"]) / 1e6


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"]) / 1e6


def _bounds(trace: Trace, events: Sequence[Event]) -> tuple[list[tuple[int, float, float]], list[str]]:
    """Return (step, begin, end) of each, touching, and notes."""
    marks = [
        (int(match[1]), _begin(event), _end(event))
        for event in events
        if event.get("cat") != "gpu_user_annotation" and (match := _STEP.fullmatch(str(event.get("name", ""))))
    ]
    if marks:
        marks.sort(key=lambda mark: mark[1])
        # A step lasts until the next one begins: what the profiler does between belongs to it.
        ends = [following[1] for following in marks[1:]] + [marks[-1][2]]
        return [(number + 1, begin, end) for (number, begin, _), end in zip(marks, ends, strict=True)], []
    begin, end = _begin(events[0]), max(map(_end, events))
    stops = sorted(_end(event) for event in events if _is(event, "Optimizer.step#"))
    if stops:
        starts = [begin, *stops[:-1]]
        note = f"{trace.path.name}: no profiler.step(): steps end with Optimizer.step"
        return [(i + 1, a, b) for i, (a, b) in enumerate(zip(starts, stops, strict=True))], [note]
    note = (
        f"{trace.path.name}: neither profiler.step() nor an optimizer's step: the whole trace counts as one step"
    )
    return [(1, begin, end)], [note]


def _is(event: Event, prefix: str) -> bool:
    return event.get("cat") in _CPU and str(event.get("name", "")).startswith(prefix)


def _step(number: int, begin: float, end: float, events: Sequence[Event]) -> ForeignStep:
    own = [event for event in events if begin <= _begin(event) < end]
    phases = [Phase(DATA, _begin(e), min(end, _end(e))) for e in own if _is(e, "enumerate(DataLoader)")]
    optimizer = [Phase(OPTIMIZER, _begin(e), min(end, _end(e))) for e in own if _is(e, "Optimizer.step#")]
    engine = [event for event in own if _is(event, "autograd::engine::evaluate_function")]
    backward = [Phase(BACKWARD, _begin(engine[0]), min(end, max(map(_end, engine))))] if engine else []
    forward = _forward(own, begin, end, [*phases, *optimizer], backward)
    exchange = _exchange(own, [*backward, *forward], end)
    phases = sorted([*phases, *forward, *backward, *optimizer], key=lambda phase: phase.end_seconds)
    return ForeignStep(number, begin, end, tuple(phases), exchange)


def _forward(
    own: Sequence[Event], begin: float, end: float, others: Sequence[Phase], backward: Sequence[Phase]
) -> list[Phase]:
    """Return what the processor did from the batch (or the optimizer's last act) until backward begins."""
    stop = backward[0].begin_seconds if backward else min(
        (phase.begin_seconds for phase in others if phase.name == OPTIMIZER), default=end
    )  # fmt: skip
    start = max((phase.end_seconds for phase in others if phase.end_seconds <= stop), default=begin)
    zeroed = [_end(e) for e in own if _is(e, "Optimizer.zero_grad#") and start <= _begin(e) and _end(e) <= stop]
    start = max([start, *zeroed])
    work = [e for e in own if e.get("cat") == "cpu_op" and start <= _begin(e) < stop]
    return [Phase(FORWARD, _begin(work[0]), stop)] if work else []


def _exchange(own: Sequence[Event], computing: Sequence[Phase], end: float) -> tuple[Exchange, ...]:
    """Return the step's collectives as one exchange; the wait is what no computation covers at its end."""
    done = [e for e in own if _COLLECTIVE.match(str(e.get("name", ""))) and e.get("cat") != "gpu_user_annotation"]
    kernels = [event for event in done if event.get("cat") == "kernel"]
    done = kernels or done
    if not done:
        return ()
    launches = [e for e in own if _LAUNCH.match(str(e.get("name", ""))) and e.get("cat") in _CPU]
    buckets = []
    for i, event in enumerate(done):
        at = min(_begin(launches[i]), _begin(event)) if len(launches) == len(done) else _begin(event)
        nbytes = _nbytes(event)
        buckets.append(BucketTimes(nbytes, 0, None, None, at, _begin(event), min(end, _end(event))))
    last = max(bucket.end_seconds for bucket in buckets)
    if kernels:
        names = (str(event.get("name", "")) for event in own)
        busy = [
            _end(event)
            for event, name in zip(own, names, strict=True)
            if event.get("cat") == "kernel" and not _COLLECTIVE.match(name) and _begin(event) < last
        ]
    else:
        busy = [phase.end_seconds for phase in computing]
    begin = min(last, max(busy, default=buckets[0].launch_seconds))
    return (Exchange(tuple(b.launch_seconds for b in buckets), begin, last, 0, tuple(buckets)),)


def _nbytes(event: Event) -> int:
    """Return the bytes of a collective where its arguments say how many elements of what."""
    args = event.get("args", {})
    elements, kind = args.get("In msg nelems"), args.get("dtype")
    return elements * _BYTES.get(str(kind), 4) if type(elements) is int and elements >= 0 else 0
