"""All that the sections speak of, read once from the run directory. What cannot be read is a note, no error."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from markupsafe import Markup

from ...core.vocabulary.errors import DataError, FarandoleError
from ...core.vocabulary.run_files import FAILURE, METRICS, RUN
from ...core.vocabulary.text import who_failed
from ...core.vocabulary.units import format_bits_per_second, format_bytes, format_seconds, format_share
from ..diagnose import Diagnosis
from ..diagnose.verdict import diagnose_records
from ..figures.inexact import counted_steps
from ..figures.step_parts import StepParts, step_parts
from ..figures.summary import Summary, summarise_records
from ..records.clock import are_comparable
from ..records.rows import StepRow
from ..records.run_reader import RunRecords, no_run, read_run
from ..records.timeline_reader import RankTimeline, links_between_hosts

MOST_NOTES = 12


@dataclass(frozen=True)
class RunFailure:
    """Why the run stopped."""

    line: str
    traceback: str = ""
    remedy: str = ""


@dataclass
class Run:
    """A run, finished or not."""

    directory: Path
    facts: Mapping[str, Any]
    """``run.json``; empty when there is none that can be read."""
    summary: Summary
    timelines: Sequence[RankTimeline]
    """Timelines of ranks with at least one step, by rank, on one clock if possible."""
    diagnosis: Diagnosis
    metrics: Sequence[Mapping[str, Any]] = ()
    """Rows of progress of ``metrics.jsonl``."""
    logged: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """Metrics of `fd.log` by name, as (step, value)."""
    failure: RunFailure | None = None
    baseline: Sequence[RankTimeline] = ()
    """Summary of the run of one process that this one is compared with."""
    notes: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> list[int]:
        """Ranks with a timeline."""
        return [timeline.started.rank for timeline in self.timelines]

    @property
    def missing_ranks(self) -> int:
        """How many ranks left nothing that can be read."""
        return max(0, self.summary.size - len(self.timelines))

    @cached_property
    def one_clock(self) -> bool:
        """Whether times of different ranks can be compared."""
        return are_comparable(self.timelines)

    @cached_property
    def parts(self) -> list[list[StepParts]]:
        """Where each step's time went, by timeline and step."""
        return step_parts(self.timelines, one_clock=self.one_clock, finds_hidden=True)

    @cached_property
    def counted_steps(self) -> frozenset[int]:
        """Those after the warm-up that all ranks have: when one has left off, the others' waits tell nothing."""
        return frozenset(counted_steps(self.timelines))

    @cached_property
    def counted(self) -> list[list[StepRow]]:
        """The rows of `counted_steps`, by timeline; all of them where nothing else is there."""
        counted = self.counted_steps
        found = [[row for row in t.steps if row.step in counted] for t in self.timelines]
        return found if all(found) else [list(t.steps) for t in self.timelines]

    @cached_property
    def counted_parts(self) -> list[list[StepParts]]:
        """The parts of `counted`, by timeline."""
        counted = self.counted_steps
        found = [[part for part in own if part.step in counted] for own in self.parts]
        return found if all(found) else self.parts

    @property
    def begin_seconds(self) -> float:
        """When the first rank began its first step."""
        return min((timeline.steps[0].begin_seconds for timeline in self.timelines), default=0.0)


def read(run_directory: Path, baseline: Path | None = None) -> Run:
    """Read a run directory.

    Raises `DataError` when it is none, or when `baseline` is none.
    """
    if not run_directory.is_dir():
        raise DataError(f"{run_directory} is not a run directory", remedy="name a directory below runs/")
    metrics, logged, metrics_notes = _read_metrics(run_directory)
    if not (run_directory / RUN).exists() and not metrics and not any(run_directory.glob("events-rank*.jsonl")):
        raise no_run(run_directory)
    try:
        records = read_run(run_directory, for_diagnosis=True)
    except DataError:  # there are metrics, or we would not be here
        records = RunRecords(run_directory, {}, 0, [], notes=["the ranks left no events that can be read"])
    timelines = records.timelines
    facts = {**records.facts, "plan": records.plan} if records.plan else records.facts
    summary = summarise_records(records, baseline=baseline)
    diagnosis = diagnose_records(records)
    notes: list[str] = []
    for note in (*records.notes, *summary.notes, *metrics_notes, *_mixed(timelines), *diagnosis.notes):
        if note not in notes:
            notes.append(note)
    return Run(
        run_directory, facts, summary, timelines, diagnosis, metrics, logged, _read_failure(run_directory),
        _baseline(summary), notes[:MOST_NOTES],
    )  # fmt: skip


def _mixed(timelines: Sequence[RankTimeline]) -> list[str]:
    """Say whose records are older than the others'."""
    old = [t.started.rank for t in timelines if not any(row.phases for row in t.steps)]
    if not 0 < len(old) < len(timelines):
        return []
    names = ", ".join(map(str, old[:8])) + (f" and {len(old) - 8} more" if len(old) > 8 else "")
    return [f"no phases were recorded by rank {names}: all but data and the exchange counts as compute there"]


def _baseline(summary: Summary) -> list[RankTimeline]:
    if summary.comparison is None:
        return []
    try:
        timelines = read_run(Path(summary.comparison.baseline)).timelines
    except FarandoleError:
        return []
    return [timeline for timeline in timelines if timeline.steps]


def _read_metrics(
    run_directory: Path,
) -> tuple[list[dict[str, Any]], dict[str, list[tuple[float, float]]], list[str]]:
    """Return the rows of progress, the logged metrics by name, and what cannot be read."""
    try:
        text = (run_directory / METRICS).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return [], {}, []
    rows: list[dict[str, Any]] = []
    logged: dict[str, list[tuple[float, float]]] = {}
    bad = 0
    for line in text.splitlines():
        try:
            row = json.loads(line)
            if row["kind"] == "step" and isinstance(row["step"], int):
                rows.append(row)
            elif row["kind"] == "metrics":
                at, values = float(row["step"]), {str(k): float(v) for k, v in row["values"].items()}
                for name, value in values.items():
                    logged.setdefault(name, []).append((at, value))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            bad += 1
    notes = [f"{METRICS}: {bad} line{'s' * (bad != 1)} cannot be read"] if bad else []
    for points in logged.values():
        points.sort(key=lambda point: point[0])
    return sorted(rows, key=lambda row: int(row["step"])), logged, notes


def _read_failure(run_directory: Path) -> RunFailure | None:
    path = run_directory / FAILURE
    if not path.exists():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        line = who_failed(values["rank"], values["host"], values.get("step"), values["cause"])
        return RunFailure(
            line[:1].upper() + line[1:],
            str(values.get("traceback") or "").rstrip(),
            str(values.get("remedy") or ""),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return RunFailure(f"The run failed; {FAILURE} cannot be read", remedy="see the logs of the ranks in logs/")


def number_of(row: Mapping[str, Any], key: str) -> float:
    """Return a number of a metrics row; NaN where it is none."""
    value = row.get(key)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


# The blocks of a section, as plain data; only `page.html.j2` knows how they look.


# How the page writes quantities.


def seconds(value: float | None) -> str:
    """Write a duration; what is not known says so."""
    return "unknown" if value is None or not math.isfinite(value) else format_seconds(value)


def milliseconds(value: float) -> str:
    """Write a duration in milliseconds with a fixed number of decimals, so that a column lines up."""
    if not math.isfinite(value):
        return "-"
    return f"{value * 1e3:,.1f}"


def percent(share: float) -> str:
    """Write a share with one decimal, so that a column lines up."""
    return format_share(share, decimals=1)


def plural(count: int, name: str) -> str:
    """Write a number of things.

    >>> plural(1, "rank"), plural(2000, "step")
    ('1 rank', '2,000 steps')
    """
    return f"{count:,} {name}{'s' * (count != 1)}"


def number(value: float) -> str:
    """Write a number with three figures."""
    return "unknown" if not math.isfinite(value) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


# The links between hosts as a table: how fast each is while data is on it. See `records.timeline_reader`.

MOST_SHOWN = 24


def table_of_links(run: Run) -> Table | None:
    """Return the links, the slowest first; None where the kernels' counts are missing."""
    links = sorted(links_between_hosts(run.timelines), key=lambda link: link.bytes_per_second)
    if not links:
        return None
    rows = [
        [
            link.source, link.target, format_bytes(link.sent_bytes),
            format_bits_per_second(8 * link.bytes_per_second), percent(link.busy_share),
        ]
        for link in links[:MOST_SHOWN]
    ]  # fmt: skip
    more = f" The slowest {MOST_SHOWN} of {len(links)}." if len(links) > MOST_SHOWN else ""
    return Table(
        ["from", "to", "sent", "rate while used", "used"],
        rows,
        texts=2,
        title="Ways between hosts, the slowest first",
        note="By the kernels' account of the ranks' connections. A way that is used all the time is what binds; "
        f"one that is hardly used is faster than its rate says.{more}",
    )


# The parts of a step (`step_parts`) by the names and colours that the page gives them.

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


def mean_parts(parts: Sequence[StepParts]) -> dict[str, float]:
    """Return the mean seconds a step by part, with ``hidden`` and ``seconds``."""
    count = max(1, len(parts))
    return {name: sum(getattr(part, name) for part in parts) / count for name in (*PARTS, "hidden", "seconds")}


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    kind: ClassVar[str] = "text"
    text: str
    quiet: bool = False
    """Small print."""


@dataclass(frozen=True)
class Code:
    """Text to paste."""

    kind: ClassVar[str] = "code"
    text: str


@dataclass(frozen=True)
class Figures:
    """Name, value and a word on it, each in a tile."""

    kind: ClassVar[str] = "figures"
    rows: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Chart:
    """A drawing with a title."""

    kind: ClassVar[str] = "chart"
    title: str
    svg: Markup
    legend: Sequence[tuple[str, str]] = ()
    note: str = ""


@dataclass(frozen=True)
class Charts:
    """Drawings side by side where there is room."""

    kind: ClassVar[str] = "charts"
    charts: Sequence[Chart]


@dataclass(frozen=True)
class Table:
    """A table; the first `texts` columns are words, the others numbers."""

    kind: ClassVar[str] = "table"
    head: Sequence[str]
    rows: Sequence[Sequence[str | Markup]]
    texts: int = 1
    note: str = ""
    title: str = ""
    legend: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Pairs:
    """Names and what they are."""

    kind: ClassVar[str] = "pairs"
    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Remedy:
    """A fix: what to do, the text to paste, the predicted gain and how it is estimated."""

    what: str
    paste: str = ""
    gain: str = ""
    basis: str = ""


@dataclass(frozen=True)
class FindingBlock:
    """Something that costs time."""

    kind: ClassVar[str] = "finding"
    title: str
    cost: str
    share: str
    confidence: str
    evidence: Sequence[str]
    remedies: Sequence[Remedy]


@dataclass(frozen=True)
class Fold:
    """Details that are folded until opened."""

    kind: ClassVar[str] = "fold"
    title: str
    blocks: Sequence[Block]


Block = Text | Code | Figures | Chart | Charts | Table | Pairs | FindingBlock | Fold


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading."""

    name: str
    """Anchor in the page, for links."""
    title: str
    blocks: Sequence[Block] = field(default_factory=tuple)
    lead: str = ""
    """What it shows, in a sentence."""
