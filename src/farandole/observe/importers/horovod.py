"""A timeline of Horovod's (or ours, which has its form) as steps with exchanges.

A timeline knows no step. Gradients are reduced once a step by the same names, so the n-th time of a name belongs
to step n; a step ends with the last of its operations. The rank waits from its last request to the last result:
after that request it has nothing left to compute but what the timeline does not show. For each operation three
numbers are kept; steps are made of them when they are written.
"""

from __future__ import annotations

import statistics
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...core.vocabulary.errors import DataError
from ...core.vocabulary.events import BucketFacts, BucketTimes, Exchange
from .foreign_rank import ForeignRank, ForeignStep
from .trace_text import Trace, is_number

_NEGOTIATE = "NEGOTIATE_"
_EPOCH = "start_time_since_epoch_in_micros"
_ABOUT = ("rank", "size", "host", _EPOCH)
_REDUCTIONS = ("ALLREDUCE", "ADASUM", "REDUCESCATTER", "ALLGATHER")


class _Operation(NamedTuple):
    """One operation by a name, times in seconds of the file."""

    requested_seconds: float
    begin_seconds: float
    end_seconds: float


class _Operations:
    """The operations by one name, in order; 24 bytes each."""

    def __init__(self) -> None:
        self._numbers = array("d")

    def add(self, operation: _Operation) -> None:
        self._numbers.extend(operation)

    def __len__(self) -> int:
        return len(self._numbers) // 3

    def __getitem__(self, number: int) -> _Operation:
        return _Operation(*self._numbers[3 * number : 3 * number + 3])


@dataclass
class _OpenActivity:
    """What is open of one process of the timeline: how many, and the outermost."""

    depth: int = 0
    name: str = ""
    begin_seconds: float = 0.0
    requested_seconds: float | None = None


@dataclass(frozen=True)
class _Steps:
    """The steps, made anew whenever they are gone through: they are much longer than what they are made of."""

    operations: Mapping[str, _Operations]
    count: int

    @property
    def begin_seconds(self) -> float:
        return min(found[0].requested_seconds for found in self.operations.values())

    def __iter__(self) -> Iterator[ForeignStep]:
        before = self.begin_seconds
        for number in range(self.count):
            own = [found[number] for found in self.operations.values() if number < len(found)]
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


class HorovodReader:
    """Takes the events of one rank's timeline."""

    keys = frozenset[str]()
    """What is read of the head."""

    def __init__(self) -> None:
        self._about: dict[str, Any] = {}
        self._names: dict[float | str, str] = {}
        self._activities: dict[float | str, _OpenActivity] = defaultdict(_OpenActivity)
        self._operations: dict[str, _Operations] = defaultdict(_Operations)

    def is_mine(self, event: dict[str, Any]) -> bool:
        """Return whether it says when the file began as Horovod's do, or negotiates."""
        return _EPOCH in event.get("args", {}) or str(event.get("name", "")).startswith(_NEGOTIATE)

    def is_my_head(self, head: dict[str, Any]) -> bool:
        """Return False: Horovod writes an array."""
        return False

    def take(self, event: dict[str, Any]) -> None:
        """Take one event."""
        process, phase, at = event.get("pid", 0), event.get("ph"), event.get("ts", 0) / 1e6
        if not isinstance(process, (int, float, str)):
            return
        if phase == "M":
            arguments = event.get("args", {})
            if process == 0:
                self._about |= {key: arguments[key] for key in _ABOUT if key in arguments}
            if event.get("name") == "process_name":
                self._names[process] = str(arguments.get("name", ""))
        elif phase == "B":
            self._begin(self._activities[process], str(event.get("name", "")), at)
        elif phase == "E" and process in self._activities and self._activities[process].depth:
            self._end(process, at)

    def _begin(self, activity: _OpenActivity, name: str, at: float) -> None:
        if not activity.depth:
            activity.name, activity.begin_seconds = name, at
            if name.startswith(_NEGOTIATE):
                activity.requested_seconds = at
        activity.depth += 1

    def _end(self, process: float | str, at: float) -> None:
        activity, owner = self._activities[process], self._names.get(process, "")
        activity.depth -= 1
        # Our own "gradients" activity is the exchange as a whole, no operation.
        if activity.depth or activity.name not in _REDUCTIONS or owner.startswith("gradients"):
            return
        asked = activity.begin_seconds if activity.requested_seconds is None else activity.requested_seconds
        self._operations[owner or f"operation {process}"].add(_Operation(asked, activity.begin_seconds, at))
        del self._activities[process]

    def finish(self, trace: Trace, position: int) -> ForeignRank:
        """Return the rank; one that does not say its number has its position's.

        Raises `DataError` when nothing in it was reduced.
        """
        operations = self._operations
        if not operations:
            raise DataError(
                f"{trace.path} has no finished reduction",
                remedy="was the timeline stopped before the first step?",
            )
        notes = list(trace.notes)
        counts = [len(found) for found in operations.values()]
        steps = _Steps(operations, round(statistics.median_high(counts)))
        unlike = [name for name, found in operations.items() if len(found) < steps.count]
        unlike += [name for name, found in operations.items() if len(found) > steps.count]
        if unlike:
            notes.append(
                f"{trace.path.name}: {len(unlike)} of {len(operations)} names were not reduced once in each"
                f" of {steps.count} steps ({', '.join(unlike[:3])}): steps may be cut in the wrong places"
            )
        rank, size, epoch = (self._about.get(key) for key in ("rank", "size", _EPOCH))
        return ForeignRank(
            trace.path,
            rank if type(rank) is int and rank >= 0 else position,
            size if type(size) is int else None,
            str(self._about.get("host") or "unknown"),
            epoch / 1e6 if type(epoch) is int and is_number(epoch) else None,
            steps.begin_seconds,
            steps,
            tuple(BucketFacts(0, "none", (name.removeprefix("allreduce."),)) for name in operations),
            notes,
        )
