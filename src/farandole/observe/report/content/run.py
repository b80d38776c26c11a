"""All that the sections speak of, read once from the run directory. What cannot be read is a note, no error."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ....core.vocabulary.errors import DataError, FarandoleError
from ....core.vocabulary.rank_lists import who_failed
from ....core.vocabulary.run_files import FAILURE, METRICS, RUN
from ...diagnose import Diagnosis
from ...diagnose.verdict import diagnose_records
from ...figures.inexact import counted_steps
from ...figures.step_parts import StepParts, step_parts
from ...figures.summary import Summary, summarise_records
from ...format.rows import StepRow
from ...read.clock import are_comparable
from ...read.run_reader import RunRecords, no_run, read_run
from ...read.timeline_reader import RankTimeline

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
