"""The steps of all ranks side by side: where each one's time went, without the warm-up.

[Note: work] What a rank does between two exchanges is its work: all of a step but the wait. The exchange ends for
all at about the same time, so the rank with the most work is the one the others wait for, and comparing work needs
no common clock. A rank that is slow inside backward is seen in its own work even where the walls of backward are
alike, since a wait that hides in backward (behind the launch of the last bucket) is taken out of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ....core.vocabulary.events import (
    DATA,
    DDP,
    EXCHANGE,
    OTHER,
    SETUP_FRONT_END,
    SETUP_LOOP,
    SETUP_PIPELINE,
    SETUP_WRAPPER,
    STEP_PHASES,
    UNDIVIDED,
)
from ....core.vocabulary.rank_lists import name_ranks
from ...figures.counted import common_steps, counted_steps, sees_exchanges, warm_up
from ...figures.device_time import rows_of
from ...figures.figures import mean
from ...figures.step_parts import COMPUTE, COMPUTE_AND_REST, least_inner, parts_of
from ...figures.waits import Wait, split_waits, waits_of
from ...format.rows import StepRow
from ...read.clock import are_comparable
from ...read.run_reader import RunRecords
from .evidence import SHOWN_RANKS


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
