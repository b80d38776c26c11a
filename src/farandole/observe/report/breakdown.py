"""Where the time of each step went, in the parts that the page shows. Pure functions on rows.

The parts but `hidden` add up to the step. The split of a wait and what hides are `waits`', the phases are
`phases.step_seconds`'s: the summary and the diagnosis take theirs from the same functions.
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
from ..phases import step_seconds
from ..rows import StepRow
from ..timeline import RankTimeline
from ..waits import hidden_by_step, rows_by_step, split_rows, waits_of, with_waits

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
    """Communication behind computing: not one of the parts that add up, and the same for all ranks of a step."""
    phases: Mapping[str, float]
    """Seconds by the name of the phase; the wait for the exchange is `EXCHANGE`."""


def parts_of_steps(timelines: Sequence[RankTimeline], *, one_clock: bool) -> list[list[Parts]]:
    """Return the parts by timeline and step. See [Note: two ways to split a wait]."""
    rows = [timeline.steps for timeline in timelines]
    split = split_rows(rows, one_clock=one_clock)
    hidden = hidden_by_step(rows_by_step(rows), one_clock=one_clock) if len(rows) > 1 else {}
    return [
        [parts_of(row, own, hidden.get(row.step, 0.0)) for row, own in zip(steps, of_rank, strict=True)]
        for steps, of_rank in zip(rows, split, strict=True)
    ]


def parts_of(row: StepRow, split: tuple[float, float], hidden: float) -> Parts:
    """Return one step's parts; `split` are its seconds of waiting for others and of communication."""
    phases = step_seconds(with_waits(row, waits_of(row)))
    waiting, total = split[0], sum(split)
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


def mean_parts(parts: Sequence[Parts]) -> dict[str, float]:
    """Return the mean seconds a step by part, with ``hidden`` and ``seconds``."""
    count = max(1, len(parts))
    return {name: sum(getattr(part, name) for part in parts) / count for name in (*PARTS, "hidden", "seconds")}
