"""A timeline of Horovod's (or ours, which has its form) as steps with exchanges.

A timeline knows no step. Gradients are reduced once a step by the same names, so the n-th time of a name belongs
to step n; a step ends with the last of its operations. The rank waits from its last request to the last result:
after that request it has nothing left to compute but what the timeline does not show.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...core.errors import DataError
from ...core.events import BucketFacts, BucketTimes, Exchange
from .foreign_rank import ForeignRank, ForeignStep
from .trace_text import Trace

_NEGOTIATE = "NEGOTIATE_"
_EPOCH = "start_time_since_epoch_in_micros"
_REDUCTIONS = ("ALLREDUCE", "ADASUM", "REDUCESCATTER", "ALLGATHER")


@dataclass(frozen=True)
class _Operation:
    """One operation by a name, times in seconds of the file."""

    requested_seconds: float
    begin_seconds: float
    end_seconds: float


def is_horovod(trace: Trace) -> bool:
    """Return whether the file says when it began as Horovod's do, or negotiates."""
    return any(
        _EPOCH in event.get("args", {}) or str(event.get("name", "")).startswith(_NEGOTIATE)
        for event in trace.events[:10_000]
    )


def read_horovod(trace: Trace, position: int) -> ForeignRank:
    """Read one rank's timeline; one that does not say its rank has its position's.

    Raises `DataError` when nothing in it was reduced.
    """
    header = _header(trace)
    operations = _operations(trace)
    if not operations:
        raise DataError(
            f"{trace.path} has no finished reduction", remedy="was the timeline stopped before the first step?"
        )
    notes = []
    counts = [len(found) for found in operations.values()]
    steps = round(statistics.median_high(counts))
    rare = [name for name, found in operations.items() if len(found) < steps]
    often = [name for name, found in operations.items() if len(found) > steps]
    if rare or often:
        notes.append(
            f"{trace.path.name}: {len(rare) + len(often)} of {len(operations)} names were not reduced once in each"
            f" of {steps} steps ({', '.join([*rare, *often][:3])}): steps may be cut in the wrong places"
        )
    rank = header.get("rank")
    size = header.get("size")
    epoch = header.get(_EPOCH)
    return ForeignRank(
        trace.path,
        rank if type(rank) is int and rank >= 0 else position,
        size if type(size) is int else None,
        str(header.get("host") or "unknown"),
        epoch / 1e6 if isinstance(epoch, int) else None,
        list(_steps(operations, steps)),
        tuple(BucketFacts(0, "none", (name.removeprefix("allreduce."),)) for name in operations),
        notes,
    )


def _header(trace: Trace) -> dict[str, Any]:
    header: dict[str, Any] = {}
    for event in trace.events:
        if event.get("ph") == "M" and event.get("pid", 0) == 0:
            header |= event.get("args", {})
    return header


def _operations(trace: Trace) -> dict[str, list[_Operation]]:
    """Return the finished reductions by name, in order."""
    names: dict[Any, str] = {}
    found: dict[str, list[_Operation]] = defaultdict(list)
    stacks: dict[Any, list[tuple[str, float]]] = defaultdict(list)
    requested: dict[Any, float] = {}
    for event in trace.events:
        lane, phase, at = event.get("pid"), event.get("ph"), event.get("ts", 0) / 1e6
        if phase == "M" and event.get("name") == "process_name":
            names[lane] = str(event.get("args", {}).get("name", ""))
        elif phase == "B":
            name = str(event.get("name", ""))
            if name.startswith(_NEGOTIATE) and not stacks[lane]:
                requested[lane] = at
            stacks[lane].append((name, at))
        elif phase == "E" and stacks[lane]:
            name, begin = stacks[lane].pop()
            # Our own "gradients" lane is the exchange as a whole, no operation.
            if not stacks[lane] and name in _REDUCTIONS and not names.get(lane, "").startswith("gradients"):
                asked = requested.pop(lane, begin)
                found[names.get(lane) or f"operation {lane}"].append(_Operation(asked, begin, at))
    return dict(found)


def _steps(operations: dict[str, list[_Operation]], steps: int) -> Iterator[ForeignStep]:
    first = min(found[0].requested_seconds for found in operations.values())
    before = first
    for number in range(steps):
        own = [found[number] for found in operations.values() if number < len(found)]
        own = sorted(own, key=lambda operation: operation.requested_seconds)
        end = max([before, *(operation.end_seconds for operation in own)])
        if own:
            buckets = tuple(
                BucketTimes(0, 0, None, None, o.requested_seconds, o.begin_seconds, o.end_seconds) for o in own
            )
            wait = max(before, own[-1].requested_seconds)
            launches = tuple(operation.requested_seconds for operation in own)
            yield ForeignStep(number + 1, before, end, (), (Exchange(launches, wait, end, 0, buckets),))
        before = end
