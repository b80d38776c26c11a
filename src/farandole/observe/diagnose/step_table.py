"""The steps of all ranks side by side: where each one's time went, without the warm-up.

[Note: work] What a rank does between two exchanges is its work: all of a step but the wait. The exchange ends for
all at about the same time, so the rank with the most work is the one the others wait for, and comparing work needs
no common clock. A rank that is slow inside backward is seen in its own work even where the walls of backward are
alike, since a wait that hides in backward (behind the launch of the last bucket) is taken out of it.

[Note: what accumulate changes] The plan key `accumulate` joins the exchanges of passes that the loop makes before
its optimizer steps. It does nothing for a loop that steps after each pass: there batches have to grow, or the loop
has to step less often.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...core.vocabulary import events
from ...core.vocabulary.events import (
    BACKWARD,
    DATA,
    DDP,
    EXCHANGE,
    OPTIMIZER,
    OTHER,
    SETUP_FRONT_END,
    SETUP_LOOP,
    SETUP_PIPELINE,
    SETUP_WRAPPER,
    STEP_PHASES,
    UNDIVIDED,
)
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.text import name_ranks, parse_numbers
from ..figures.figures import mean
from ..figures.inexact import common_steps, counted_steps, sees_exchanges, sync_of, warm_up
from ..figures.step_parts import (
    COMPUTE,
    COMPUTE_AND_REST,
    Wait,
    least_inner,
    parts_of,
    rows_of,
    split_waits,
    waits_of,
)
from ..records.clock import are_comparable
from ..records.rows import StepRow
from ..records.run_reader import RunRecords
from .finding import KINDS, LEAST_SHARE, OUTSIDE, SHOWN_RANKS, Finding, Fix, Gain, command_with, format_cost

# Which cores the ranks of a machine have: by what each rank recorded, which may be the same cores or others.


def rows_by_machine(table: StepTable) -> list[list[int]]:
    """Return the rows of each machine: emulated hosts of one machine share its clock, and its cores."""
    found: dict[str, list[int]] = {}
    for row, timeline in enumerate(table.records.timelines):
        found.setdefault(timeline.started.clock or timeline.host, []).append(row)
    return list(found.values())


def cores_of(table: StepTable, row: int) -> int | None:
    """Return how many cores a rank may run on."""
    timeline = table.records.timelines[row]
    cores = timeline.setup.get(events.SETUP_CORES)
    if type(cores) is int and cores > 0:
        return cores
    return max((sample.cores for sample in timeline.samples if sample.cores), default=None)


def cores_together(table: StepTable, rows: Sequence[int]) -> int | None:
    """Return how many cores some ranks of a machine may run on together.

    None: some rank did not record which they are.
    """
    every: set[int] = set()
    for row in rows:
        text = table.records.timelines[row].setup.get(events.SETUP_CORE_LIST)
        own = parse_numbers(text) if isinstance(text, str) else set()
        if not own:
            return None
        every |= own
    return len(every)


# Backward passes and optimizer steps of a step, and how a loop comes to fewer exchanges for the same samples.

_STEP = "optimizer.step()\n    optimizer.zero_grad()  # here alone"


def passes_of(table: StepTable) -> int:
    """Return the usual number of backward passes in a step; 0 where passes were not recorded."""
    return _usual(table, BACKWARD)


def optimizer_steps_of(table: StepTable) -> int:
    """Return how many optimizers usually step in a step; at least 1."""
    return max(1, _usual(table, OPTIMIZER))


def accumulated(table: StepTable) -> int:
    """Return the plan's `accumulate`."""
    value = table.records.plan.get("accumulate")
    return value if type(value) is int and value > 0 else 1


def bucket_bytes_of(setup: Mapping[str, Any], plan: Mapping[str, Any]) -> int | None:
    """Return the plan's `bucket_bytes`; what a training takes on its device where the plan leaves it open.

    None: no plan was recorded. `setup`: what the run noted of itself.
    """
    value = plan.get("bucket_bytes")
    on_device = setup.get(events.SETUP_DEVICE, "cpu") != "cpu"
    return Plan().with_bucket_bytes(on_device=on_device).bucket_bytes if value == 0 else value


def less_often(table: StepTable, seconds: float) -> Fix:
    """Return the fix by half as many exchanges for the same samples. `seconds`: exposed, of a step.

    See [Note: what accumulate changes].
    """
    gain = Gain(seconds / 2, "half as many exchanges for the same samples: half of the exposed time")
    sync = sync_of(table.records)
    if not sync.is_every_step:
        rarer = {"sync": replace(sync, steps=2 * sync.steps).to_text()}
        what = f"meet after {2 * sync.steps} steps of each rank, not {sync.steps} (ranks drift further apart)"
        return Fix(what, command_with(table.records, rarer), gain, rarer)
    now = accumulated(table)
    if table.front_end:  # whose optimizer counts passes itself
        passes = "two backward passes" if now == 1 else f"{2 * now} backward passes, not {now},"
        changes = {"accumulate": 2 * now}
        what = f"exchange gradients of {passes} at a time (doubles the global batch)"
        return Fix(what, command_with(table.records, changes), gain, changes)
    batch = table.records.timelines[0].setup.get(events.SETUP_BATCH)
    if type(batch) is int and batch > 0:
        return Fix(
            "batches twice as large (the learning rate may need a change)",
            f"batch_size={2 * batch}  # argument of the DataLoader", gain, {events.SETUP_BATCH: 2 * batch},
        )  # fmt: skip
    what = "batches twice as large; or step after every second one, without an exchange for the first"
    return Fix(what, held_passes(2, steps=True), gain)


def held_passes(count: int, *, steps: bool = False) -> str:
    """Return lines of a loop that exchange gradients after every `count`-th pass; with `steps`, and step there."""
    lines = f"with fd.accumulate((i + 1) % {count} > 0):\n    loss.backward()"
    return lines + (f"\nif (i + 1) % {count} == 0:\n    {_STEP}" if steps else "")


def _usual(table: StepTable, name: str) -> int:
    counts = [sum(phase.name == name for phase in row.phases) for own in table.rows for row in own]
    return statistics.mode(counts) if counts else 0


@dataclass(frozen=True)
class RankStep:
    """One step of one rank, in seconds; `phases`, `communication` and `waiting` add up to `length`."""

    length: float
    phases: Mapping[str, float]
    """Work by phase."""
    waiting: float
    communication: float
    lateness: float | None = None
    """Lateness of its last launch relative to the median of the other ranks. None: clocks cannot be compared."""
    samples: int = 0
    tokens: int = 0
    inner: Mapping[str, float] = field(default_factory=dict)
    """Part of `communication`: exchanges inside of phases, by degree."""

    @property
    def of_gradients(self) -> float:
        """Part of `communication`: exchanges of gradients."""
        return self.communication - sum(self.inner.values())

    @property
    def work(self) -> float:
        """All but the wait."""
        return self.length - self.waiting - self.communication


@dataclass(frozen=True)
class StepTable:
    """Cells by rank and step."""

    records: RunRecords
    steps: list[int]
    rows: list[list[StepRow]]
    """By rank (in the order of `records.timelines`) and step."""
    cells: list[list[RankStep]]
    warm_up_steps: int
    one_clock: bool
    notes: list[str] = field(default_factory=list)
    sees_exchanges: bool = True
    """Whether exchanges were seen; of several ranks without any, communication is unknown."""

    @property
    def ranks(self) -> list[int]:
        """Ranks by row."""
        return [records.rank for records in self.records.timelines]

    @property
    def step_seconds(self) -> float:
        """Mean length of a step."""
        return mean([cell.length for own in self.cells for cell in own])

    @property
    def undivided_share(self) -> float:
        """Share of the steps in which computing and waiting for data are not told apart."""
        cells = [cell for own in self.cells for cell in own]
        return sum(cell.phases.get(UNDIVIDED, 0.0) for cell in cells) / (sum(cell.length for cell in cells) or 1.0)

    @property
    def front_end(self) -> str:
        """Whose loop trains: one of `events.FRONT_ENDS`; empty for one of torch."""
        return str(self.records.timelines[0].setup.get(SETUP_FRONT_END) or "")

    @property
    def loop(self) -> str:
        """Whose loop of torch trains: one of `events.LOOPS`; empty for the script's own."""
        return str(self.records.timelines[0].setup.get(SETUP_LOOP) or "")

    @property
    def wrapper(self) -> str:
        """Torch's class that exchanges the gradients: one of `events.WRAPPERS`; empty where our engine does.

        In records that do not say it, buckets whose layout is not ours are those of DistributedDataParallel.
        """
        records = self.records.timelines
        if name := records[0].setup.get(SETUP_WRAPPER):
            return str(name)
        has_buckets = any(exchange.buckets for own in self.rows for row in own for exchange in row.exchanges)
        return DDP if has_buckets and not self.front_end and not any(each.layouts for each in records) else ""

    def by_step(self) -> list[list[RankStep]]:
        """Return the cells of all ranks, by step."""
        return [list(cells) for cells in zip(*self.cells, strict=True)]

    def phase_names(self) -> list[str]:
        """Return the names of all phases that occur, in the order of a step."""
        found = {name for own in self.cells for cell in own for name in cell.phases}
        known = [name for name in STEP_PHASES if name in found and name != EXCHANGE]
        return [*known, *sorted(found - set(known) - {OTHER}), *([OTHER] if OTHER in found else [])]


def make_step_table(records: RunRecords) -> StepTable:
    """Return the steps that all ranks have, after the warm-up."""
    steps = common_steps(records.timelines)
    every = max((r.step_count for r in records.timelines), default=0)
    skip = warm_up(min((r.step_count for r in records.timelines), default=0))
    counted = counted_steps(records.timelines)
    notes = []
    if len(steps) < every:
        notes.append(f"looked closely at {len(counted)} of {every} steps")
        notes += _ended_early(records)
    by_step = [{row.step: row for row in rows_of(r)} for r in records.timelines]
    rows = [[own[step] for step in counted] for own in by_step]
    one_clock = are_comparable(records.timelines)
    if not one_clock and not records.incomparable and len(rows) > 1:
        notes.append("the ranks' clocks do not agree: times of different ranks are not compared")
    seen = sees_exchanges(records.timelines)
    cells = _cells(rows, one_clock, least_inner(records.timelines, rows))
    return StepTable(records, counted, rows, cells, skip, one_clock, notes, seen)


def _ended_early(records: RunRecords) -> list[str]:
    """Say whose records end before those of others: a rank that was killed leaves its last second unwritten."""
    last = {own.rank: own.steps[-1].step for own in records.timelines}
    end = max(last.values())
    early = [rank for rank, step in last.items() if step < end - 1]
    if not early:
        return []
    first = min(last.values())
    who = name_ranks(early, most=SHOWN_RANKS)
    return [f"the records of {who} end at step {first}, those of others at {end}: later steps don't count"]


def computing_of(table: StepTable, row: int) -> float:
    """Return the mean seconds of a step in which a rank computes. In records without phases, all of its work."""
    names = COMPUTE if has_phases(table.rows) else COMPUTE_AND_REST
    return mean([sum(cell.phases.get(name, 0.0) for name in names) for cell in table.cells[row]])


def route_of(table: StepTable) -> str:
    """Return what the newest buckets travelled by; empty where nothing tells."""
    layouts = [records.layouts[-1][1] for records in table.records.timelines if records.layouts]
    return layouts[0].route if layouts else ""


def is_pipeline(table: StepTable) -> bool:
    """Return whether the ranks form pipelines."""
    return any(timeline.setup.get(SETUP_PIPELINE) for timeline in table.records.timelines)


def has_phases(rows: Sequence[Sequence[StepRow]]) -> bool:
    """Return whether all ranks tell their phases, which alone makes them comparable."""
    return all(any(row.phases for row in own) for own in rows)


def _cells(
    rows: Sequence[Sequence[StepRow]], one_clock: bool, least: Sequence[Sequence[Mapping[str, float]]]
) -> list[list[RankStep]]:
    cells: list[list[RankStep]] = [[] for _ in rows]
    known = has_phases(rows)
    for own, inner in zip(zip(*rows, strict=True), zip(*least, strict=True), strict=True):
        waits = [waits_of(row) for row in own]
        splits = split_waits(waits, one_clock=one_clock)
        late = _lateness(waits) if one_clock and len(own) > 1 else [None] * len(own)
        for rank, row in enumerate(own):
            cells[rank].append(_cell(row, waits[rank], splits[rank], late[rank], inner[rank], has_phases=known))
    return cells


def _lateness(waits: Sequence[Sequence[Wait]]) -> list[float | None]:
    if not all(waits):
        return [None] * len(waits)
    arrived = [own[-1].arrived for own in waits]
    return [at - statistics.median(arrived[:rank] + arrived[rank + 1 :]) for rank, at in enumerate(arrived)]


def _cell(
    row: StepRow,
    waits: Sequence[Wait],
    split: tuple[float, float],
    lateness: float | None,
    least: Mapping[str, float],
    *,
    has_phases: bool,
) -> RankStep:
    """Return one step of one rank. Records of version 1 know data and the exchange, the rest is `OTHER`."""
    parts = parts_of(row, waits, split, least)
    phases = {name: seconds for name, seconds in parts.phases.items() if name != EXCHANGE}
    if not has_phases:
        data = phases.get(DATA, 0.0)
        phases = {DATA: data, OTHER: sum(phases.values()) - data}
    return RankStep(
        parts.seconds, phases, parts.waiting, parts.communication, lateness, row.samples, row.tokens or 0,
        {name: least[name] for name in parts.inner},
    )  # fmt: skip


# Costs beside each other: no second of a step is in two of them.
#
# [Note: findings are disjoint] A step is the work of its latest rank and the exchange behind it. Exposed
# communication is the exchange and nothing else. In the work, data that all wait for, lateness, pauses and spikes
# are different seconds because each finder leaves out what those before it explained: jitter leaves out
# stragglers, pauses and spikes; spikes leave out pauses, and what is exchange or data already; a shared core
# counts while its rank computes, and what it loses in the exchange is in the exchange's cost; launches leave out
# shared cores. Costs estimated from rates of the host come last and get at most the time that the others leave. A
# slow start is spread over all steps and lies outside of the mean step.
#
# [Note: the room of a cost] Whatever a finder estimates, its cost is taken from the seconds of the parts it can
# come from, each of them of the rank that has most of it, and these are gone for later findings: no finding costs
# more than its parts, nor do several together.


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
