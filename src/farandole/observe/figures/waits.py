"""Waits for exchanges, and when their buckets were on the wire: what the summary, the page and the diagnosis say.

[Note: two ways to split a wait] Until the last rank has launched its last bucket, the others wait for it; the rest
is the network. Where clocks cannot be compared, the rank that waits least tells what the network takes.

[Note: when a bucket is on the wire] A sum travels from when its turn has come on the last rank until the last rank
has it: who hands its part over earlier waits for that rank, not for the network. Where clocks cannot be compared,
the rank whose buckets took the least time all in all tells: it waited least for the others. What of that time lies
before the last rank has nothing left to compute is hidden. Nothing here is estimated from a rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...core.vocabulary.events import BACKWARD
from ..format.rows import ExchangeRow, StepRow
from .figures import busy_seconds, split_wait

_UNSEEN_SECONDS = 1.5e-6
"""Records are exact to a microsecond: a wait that was seen is longer."""
_SAME_SECONDS = 1e-4


@dataclass(frozen=True)
class Wait:
    """One exchange of one rank."""

    arrived: float
    """When it launched its last bucket."""
    begin: float
    end: float


class WireTime(NamedTuple):
    """When the buckets of one exchange were on the wire, and from when on no rank computed."""

    spans: Sequence[tuple[float, float]]
    """By bucket, in launch order: begin and end. They may overlap."""
    computed: float

    @property
    def busy_seconds(self) -> float:
        """How long something was on the wire."""
        return busy_seconds(self.spans)

    @property
    def hidden_seconds(self) -> float:
        """How much of that was behind computing."""
        return busy_seconds([(begin, min(end, self.computed)) for begin, end in self.spans])

    @property
    def shares_wire(self) -> list[bool]:
        """Whether each bucket left before the ones before it had arrived."""
        free, found = -float("inf"), []
        for begin, end in self.spans:
            found.append(begin < free)
            free = max(free, end)
        return found

    @property
    def serialized_seconds(self) -> list[float]:
        """How long each bucket took once the one before it had arrived."""
        free, found = -float("inf"), []
        for begin, end in self.spans:
            found.append(max(0.0, end - max(begin, free)))
            free = max(free, end)
        return found


def waits_of(row: StepRow) -> list[Wait]:
    """Return when a rank arrived at each exchange of a step, and from when to when it waited for it.

    If no wait was recorded although the last bucket was in flight in backward, backward waited itself, as
    wrappers do whose hooks are not timed.
    """
    return [_wait_of(exchange, row) for exchange in row.exchanges]


def _wait_of(exchange: ExchangeRow, row: StepRow) -> Wait:
    begin, end = exchange.wait_begin_seconds, exchange.wait_end_seconds
    arrived = max(exchange.launch_seconds, default=begin)  # named operations leave in any order
    if exchange.buckets and end - begin < _UNSEEN_SECONDS:
        last = max(bucket.end_seconds for bucket in exchange.buckets)
        backward = max((p.end_seconds for p in row.phases if p.name == BACKWARD), default=0.0)
        if arrived + _SAME_SECONDS < last <= backward + _SAME_SECONDS:
            return Wait(arrived, arrived, last)
    return Wait(arrived, begin, end)


def with_waits(row: StepRow, waits: Sequence[Wait]) -> StepRow:
    """Return the row with the unrecorded waits instead of the recorded ones."""
    exchanges = [
        replace(exchange, wait_begin_seconds=wait.begin, wait_end_seconds=wait.end)
        for exchange, wait in zip(row.exchanges, waits, strict=True)
    ]
    return replace(row, exchanges=exchanges)


def split_waits(waits: Sequence[Sequence[Wait]], *, one_clock: bool) -> list[tuple[float, float]]:
    """Return (waiting for others, communication) in seconds by rank; `waits` are those of one step, by rank.

    See [Note: two ways to split a wait].
    """
    totals = [(0.0, 0.0)] * len(waits)
    for number in range(max((len(own) for own in waits), default=0)):
        here = [own[number] if number < len(own) else None for own in waits]
        present = [wait for wait in here if wait is not None]
        last = max(wait.arrived for wait in present)
        least = min(wait.end - wait.begin for wait in present)
        for rank, wait in enumerate(here):
            if wait is None:
                continue
            latest = last if one_clock else wait.end - least
            waiting, wire = split_wait(wait.begin, wait.end, latest)
            totals[rank] = (totals[rank][0] + waiting, totals[rank][1] + wire)
    return totals


def wires_of(rows: Sequence[StepRow], *, one_clock: bool) -> list[WireTime | None]:
    """Return the exchanges of one step, given the rows of all ranks that have it.

    None stands for an exchange whose buckets were not timed, or not as many on every rank.
    See [Note: when a bucket is on the wire].
    """
    count = min((len(row.exchanges) for row in rows), default=0)
    waits = [waits_of(row) for row in rows]
    return [
        _wire_of([row.exchanges[i] for row in rows], [own[i] for own in waits], one_clock=one_clock)
        for i in range(count)
    ]


def _wire_of(exchanges: Sequence[ExchangeRow], waits: Sequence[Wait], *, one_clock: bool) -> WireTime | None:
    count = len(exchanges[0].buckets)
    if count == 0 or any(len(exchange.buckets) != count for exchange in exchanges):
        return None
    if one_clock:
        spans = [
            (max(times.begin_seconds for times in bucket), max(times.end_seconds for times in bucket))
            for bucket in zip(*(exchange.buckets for exchange in exchanges), strict=True)
        ]
        return WireTime(spans, max(wait.begin for wait in waits))
    wires = [
        WireTime([(times.begin_seconds, times.end_seconds) for times in exchange.buckets], wait.begin)
        for exchange, wait in zip(exchanges, waits, strict=True)
    ]
    return min(wires, key=lambda wire: wire.busy_seconds)


def hidden_by_step(by_step: Mapping[int, Sequence[StepRow]], *, one_clock: bool) -> dict[int, float]:
    """Return the seconds of communication behind computing, by step; `by_step` are the rows of all ranks."""
    return {
        step: sum(wire.hidden_seconds for wire in wires_of(rows, one_clock=one_clock) if wire is not None)
        for step, rows in by_step.items()
    }


def rows_by_step(rows: Sequence[Sequence[StepRow]]) -> dict[int, list[StepRow]]:
    """Return the rows of all ranks that have a step, by step; `rows` are by rank and step."""
    found: dict[int, list[StepRow]] = {}
    for own in rows:
        for row in own:
            found.setdefault(row.step, []).append(row)
    return found


def split_rows(rows: Sequence[Sequence[StepRow]], *, one_clock: bool) -> list[list[tuple[float, float]]]:
    """Return (waiting for others, communication) in seconds, by rank and step as `rows` are."""
    members: dict[int, list[tuple[int, int]]] = {}
    for rank, own in enumerate(rows):
        for number, row in enumerate(own):
            members.setdefault(row.step, []).append((rank, number))
    found = [[(0.0, 0.0)] * len(own) for own in rows]
    for here in members.values():
        split = split_waits([waits_of(rows[rank][number]) for rank, number in here], one_clock=one_clock)
        for (rank, number), seconds in zip(here, split, strict=True):
            found[rank][number] = seconds
    return found
