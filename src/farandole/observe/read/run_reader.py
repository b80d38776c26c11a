"""Reading a run directory: all ranks' timelines on one clock, in bounded memory, and notes of what is missing.

The one reader of runs: the closing summary, the diagnosis, the report, exports and benchmarks start here.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.vocabulary.errors import DataError
from ...core.vocabulary.events import SETUP_PLAN
from ...core.vocabulary.run_files import RUN, events_path
from .clock import common_clock
from .run_end import note_killed
from .timeline_reader import RankTimeline, read_events

MISSING_KEPT = 1000
NOTES_KEPT = 3
RUNS_NAMED = 4


@dataclass
class RunRecords:
    """What the ranks of a run recorded."""

    directory: Path
    facts: Mapping[str, Any]
    """``run.json``; empty when there is none that can be read."""
    size: int
    """Ranks that the run had, also those that left no records."""
    timelines: list[RankTimeline]
    """By rank; on rank 0's clock but for those of `incomparable` ranks."""
    incomparable: frozenset[int] = frozenset()
    """Ranks whose times cannot be compared with the others'."""
    clock_error_seconds: float = 0.0
    """By how much a time may be wrong beside that of another host."""
    notes: list[str] = field(default_factory=list)
    """What is missing, in words."""
    missing: list[int] = field(default_factory=list)
    """Ranks that left nothing, the first thousand; empty where no rank left anything."""

    @property
    def name(self) -> str:
        """What the run is called: its directory."""
        return self.directory.resolve().name or "run"

    @property
    def plan(self) -> Mapping[str, Any]:
        """The plan as it was applied, or nothing."""
        plan = self.facts.get("plan")
        return {**(plan if isinstance(plan, dict) else {}), **(self.script_plan or {})}

    @property
    def script_plan(self) -> Mapping[str, Any] | None:
        """The keys that a plan in the script sets, if it has one: the command of such a run can give none."""
        text = self.timelines[0].setup.get(SETUP_PLAN) if self.timelines else None
        try:
            keys = json.loads(text) if isinstance(text, str) else None
        except ValueError:
            return None
        return keys if isinstance(keys, dict) else None


def read_run(
    run_directory: Path, *, steps: tuple[int, int] | None = None, for_diagnosis: bool = False
) -> RunRecords:
    """Read the records of a run.

    Args:
        run_directory: where the run's files are.
        steps: read the steps from the first to the last given, and no sums. None: of a long run a fair sample of
            the steps' rows (`timeline_reader`), and sums of the others.
        for_diagnosis: count pauses and lengths over all steps (`StepCounts`), leave out ranks without a step, and
            say in the notes all that limits a diagnosis.

    Raises:
        DataError: there is no such directory, or `for_diagnosis` and nothing of a run is in it.
    """
    if not run_directory.is_dir():
        raise DataError(f"{run_directory} is not a run directory", remedy="name a directory below runs/")
    paths = sorted(run_directory.glob("events-rank*.jsonl"))
    if for_diagnosis and not paths and not (run_directory / RUN).exists():
        raise no_run(run_directory)
    facts = read_facts(run_directory)
    notes = ["this run was simulated by an earlier version: no rank ran"] if facts.get("simulated") else []
    if for_diagnosis:
        if not facts:
            notes.append(f"{RUN} is missing or cannot be read: plan and environment are unknown")
        notes += note_killed(run_directory, time.time())
    by_rank: dict[int, RankTimeline] = {}
    for path in paths:
        try:
            timeline = read_events(path, bounded=True, steps=steps, counts=for_diagnosis)
        except DataError as problem:
            notes.append(problem.message)
            continue
        notes += _note_skipped(path, timeline)
        if timeline.rank in by_rank:
            notes.append(f"{path.name}: says it is rank {timeline.rank}'s, as another file does; left out")
            continue
        by_rank[timeline.rank] = timeline
    size = int(facts.get("size") or max((timeline.started.size for timeline in by_rank.values()), default=0))
    missing = _note_missing(run_directory, by_rank, size, notes)
    ranks = sorted(by_rank)
    if for_diagnosis:
        notes += [f"rank {rank} recorded no step" for rank in ranks if not by_rank[rank].steps]
        ranks = [rank for rank in ranks if by_rank[rank].steps]
    clock = common_clock([by_rank[rank] for rank in ranks])
    return RunRecords(
        run_directory, facts, size, clock.timelines, clock.incomparable, clock.error_seconds,
        notes + clock.notes, missing,
    )  # fmt: skip


def read_facts(run_directory: Path) -> dict[str, Any]:
    """Return ``run.json``; empty when there is none that can be read."""
    try:
        facts = json.loads((run_directory / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(facts, dict):
        return {}
    if type(facts.get("size")) is not int or facts["size"] < 1:
        facts.pop("size", None)  # the events say it too
    return facts


def no_run(directory: Path) -> DataError:
    """Return the error of a directory that holds nothing of a run, with the runs that are in it, as in demos."""
    inside = [path.parent.name for path in sorted(directory.glob(f"*/{RUN}"))[:RUNS_NAMED]]
    remedy = (
        f"name one of the runs in it: {', '.join(inside)}" if inside else f"expected {RUN} or events-rank0.jsonl"
    )
    return DataError(f"{directory} holds nothing of a run", remedy=remedy)


def _note_skipped(path: Path, timeline: RankTimeline) -> list[str]:
    notes = timeline.skipped[:NOTES_KEPT]
    if timeline.skipped_lines > NOTES_KEPT:
        notes.append(f"{path.name}: {timeline.skipped_lines} lines in all could not be read")
    return notes


def _note_missing(
    run_directory: Path, by_rank: Mapping[int, RankTimeline], size: int, notes: list[str]
) -> list[int]:
    missing = list(itertools.islice((rank for rank in range(size) if rank not in by_rank), MISSING_KEPT))
    if not missing or not by_rank:
        return []
    count = size - sum(rank < size for rank in by_rank)
    names = ", ".join(events_path(run_directory, rank).name for rank in missing[:4])
    more = ", ..." if len(missing) > 4 else ""
    notes.append(f"{count} of {size} ranks left no events ({names}{more}): what they did is not part of this")
    return missing
