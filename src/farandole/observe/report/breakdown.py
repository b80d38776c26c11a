"""Where the time of each step went, in the parts that the page shows. Pure functions on rows.

The parts but `hidden` add up to the step. The split of a wait is `figures.split_wait`'s, the phases are
`phases.step_seconds`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...core.events import (
    BACKWARD,
    CHECKPOINT,
    DATA,
    EVALUATION,
    EXCHANGE,
    FORWARD,
    GARBAGE_COLLECTION,
    LOSS,
    OPTIMIZER,
)
from ..figures import busy_seconds, split_wait
from ..phases import step_seconds
from ..rows import ExchangeRow, StepRow
from ..timeline import RankTimeline

PARTS = ("compute", "communication", "waiting", "data", "pauses", "rest")
NAMES: Mapping[str, str] = {
    "compute": "compute",
    "communication": "exposed communication",
    "waiting": "waiting for others",
    "data": "data loading",
    "pauses": "pauses",
    "rest": "rest",
    "hidden": "hidden communication",
}
STYLES = [f"part-{name}" for name in PARTS]
COMPUTE = (FORWARD, LOSS, BACKWARD, OPTIMIZER)
PAUSES = (GARBAGE_COLLECTION, CHECKPOINT, EVALUATION)


@dataclass(frozen=True)
class Parts:
    """One step of one rank, in seconds."""

    step: int
    seconds: float
    compute: float
    communication: float
    """Exposed: waiting for the network with nothing left to compute."""
    waiting: float
    """For ranks that were not there yet."""
    data: float
    pauses: float
    """Garbage collection, checkpoints, evaluation, and what the script names with `fd.phase`."""
    rest: float
    """In no phase."""
    hidden: float
    """Communication behind computing: not one of the parts that add up."""
    phases: Mapping[str, float]
    """Seconds by the name of the phase; the wait for the exchange is `EXCHANGE`."""


def parts_of_steps(timelines: Sequence[RankTimeline], *, one_clock: bool) -> list[list[Parts]]:
    """Return the parts by timeline and step. Without one clock all waiting is communication."""
    last: dict[tuple[int, int], float] = {}
    if one_clock:
        for timeline in timelines:
            for row in timeline.steps:
                for i, exchange in enumerate(row.exchanges):
                    at = _arrival(exchange)
                    last[row.step, i] = max(last.get((row.step, i), at), at)
    return [[parts_of(row, last) for row in timeline.steps] for timeline in timelines]


def parts_of(row: StepRow, last_launch: Mapping[tuple[int, int], float]) -> Parts:
    """Return one step's parts; `last_launch` says by step and exchange when the last rank was there."""
    phases = step_seconds(row)
    waiting = hidden = total = 0.0
    for i, exchange in enumerate(row.exchanges):
        begin, end = exchange.wait_begin_seconds, exchange.wait_end_seconds
        waiting += split_wait(begin, end, last_launch.get((row.step, i), begin))[0]
        total += end - begin
        hidden += hidden_seconds(exchange)
    exposed = phases.get(EXCHANGE, 0.0)
    # A wait that a pause interrupts counts as the pause: both shares of the wait shrink alike.
    waiting = min(exposed, waiting * exposed / total) if total > 0 else 0.0
    data, rest = phases.get(DATA, 0.0), phases.get("other", 0.0)
    compute = sum(phases.get(name, 0.0) for name in COMPUTE)
    if not any(name in phases for name in COMPUTE):  # nobody told computing apart, as in version 1
        compute, rest = compute + rest, 0.0
    known = (*COMPUTE, DATA, EXCHANGE, "other")
    pauses = sum(seconds for name, seconds in phases.items() if name not in known)
    seconds = row.end_seconds - row.begin_seconds
    return Parts(row.step, seconds, compute, exposed - waiting, waiting, data, pauses, rest, hidden, phases)


def hidden_seconds(exchange: ExchangeRow) -> float:
    """Return how long something was on its way before the rank began to wait."""
    spans = sorted((bucket.begin_seconds, bucket.end_seconds) for bucket in exchange.buckets)
    return busy_seconds([(begin, min(end, exchange.wait_begin_seconds)) for begin, end in spans])


def _arrival(exchange: ExchangeRow) -> float:
    return exchange.launch_seconds[-1] if exchange.launch_seconds else exchange.wait_begin_seconds


def mean_parts(parts: Sequence[Parts]) -> dict[str, float]:
    """Return the mean seconds a step by part, with ``hidden`` and ``seconds``."""
    count = max(1, len(parts))
    return {name: sum(getattr(part, name) for part in parts) / count for name in (*PARTS, "hidden", "seconds")}
