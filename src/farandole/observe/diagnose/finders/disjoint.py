"""Costs beside each other: no second of a step is in two of them.

[Note: findings are disjoint] A step is the work of its latest rank and the exchange behind it. Exposed
communication is the exchange and nothing else. In the work, data that all wait for, lateness, pauses and spikes
are different seconds because each finder leaves out what those before it explained: jitter leaves out
stragglers, pauses and spikes; spikes leave out pauses, and what is exchange or data already; a shared core
counts while its rank computes, and what it loses in the exchange is in the exchange's cost; launches leave out
shared cores. Costs estimated from rates of the host come last and get at most the time that the others leave. A
slow start is spread over all steps and lies outside of the mean step.

[Note: the room of a cost] Whatever a finder estimates, its cost is taken from the seconds of the parts it can
come from, each of them of the rank that has most of it, and these are gone for later findings: no finding costs
more than its parts, nor do several together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ....core.vocabulary.events import DATA, OPTIMIZER, OTHER, UNDIVIDED
from ...figures.figures import mean
from ...figures.step_parts import COMPUTE, COMPUTE_AND_REST
from .finding import KINDS, LEAST_SHARE, OUTSIDE, Finding, format_cost
from .step_table import StepTable

COMMUNICATION = "communication"
WAITING = "waiting"
_WORK = (*COMPUTE_AND_REST, UNDIVIDED, DATA)
_SOURCES: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(
        ("communication", "small-buckets", "large-buckets", "slow-link", "extra-exchange", "absent",
         *(kind for kind in KINDS if kind.endswith("-communication"))),
        (COMMUNICATION,),
    ),
    **dict.fromkeys(("straggler", "samples", "jitter"), _WORK),
    **dict.fromkeys(("launch", "threads"), COMPUTE),
    "oversubscribed": COMPUTE,
    "experts": COMPUTE,
    "memory": _WORK,
    "crowded": (*COMPUTE, UNDIVIDED, COMMUNICATION, WAITING, OTHER),
    **dict.fromkeys(("bubble", "slow-stage", "pipeline-communication"), (WAITING,)),
    "input": (DATA,),
    "optimizer": (OPTIMIZER,),
    "small-batch": (OPTIMIZER, COMMUNICATION),
    "other": (OTHER,),
}  # fmt: skip
"""Parts that a kind's cost can come from, the first ones first; pauses and spikes are parts themselves."""


def room_of(table: StepTable) -> dict[str, float]:
    """Return the seconds of a mean step by part, each of the rank that has most of it in the step."""
    columns = table.by_step()
    room = {
        name: mean([max(cell.phases.get(name, 0.0) for cell in cells) for cells in columns])
        for name in table.phase_names()
    }
    room[COMMUNICATION] = mean([max(cell.communication for cell in cells) for cells in columns])
    room[WAITING] = mean([max(cell.waiting for cell in cells) for cells in columns])
    return room


def sources_of(finding: Finding, *, known: bool = True) -> Sequence[str] | None:
    """Return the parts that a finding's cost can come from; None: any. `known`: whether phases are."""
    if finding.kind == "oversubscribed" and finding.phase:
        return _WORK  # of a late rank
    names = _SOURCES.get(finding.kind)
    return (*names, OTHER) if names is not None and not known and OTHER not in names else names


def make_disjoint(
    findings: Sequence[Finding], step_seconds: float, room: Mapping[str, float], *, known: bool = True
) -> list[Finding]:
    """Return the findings, surest first, with costs that fit into their parts, and together into a step.

    `findings` are in the order of how sure their costs are; `room` is that of `room_of`, and `known` whether its
    phases are. A finding that keeps less than the least share is dropped. See [Note: the room of a cost].
    """
    left, room = step_seconds, dict(room)
    kept = []
    for finding in findings:
        if finding.kind in OUTSIDE:
            kept.append(finding)
            continue
        sources = sources_of(finding, known=known)
        there = left if sources is None else min(left, sum(room.get(name, 0.0) for name in sources))
        seconds = min(finding.seconds, there)
        if seconds < LEAST_SHARE * step_seconds:
            continue
        left -= seconds
        _take(room, sources or (), seconds)
        kept.append(scaled_to(finding, seconds / finding.seconds))
    return kept


def _take(room: dict[str, float], sources: Sequence[str], seconds: float) -> None:
    for name in sources:
        taken = min(seconds, room.get(name, 0.0))
        if taken > 0:
            room[name] -= taken
            seconds -= taken


def scaled_to(finding: Finding, part: float) -> Finding:
    """Return a finding at a part of its cost, its title and its gains with it."""
    if part == 1.0:
        return finding
    seconds, share = part * finding.seconds, part * finding.share
    fixes = tuple(
        replace(fix, gain=None if fix.gain is None else replace(fix.gain, seconds=part * fix.gain.seconds))
        for fix in finding.fixes
    )
    title = finding.title.replace(format_cost(finding.seconds, finding.share), format_cost(seconds, share))
    return replace(finding, title=title, seconds=seconds, share=share, fixes=fixes)
