"""Reading a run directory: all ranks' timelines on one clock, in bounded memory, and notes of what is missing.

The one reader of runs: the closing summary, the diagnosis, the report, exports and benchmarks start here.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.vocabulary.errors import DataError
from ...core.vocabulary.events import SETUP_PLAN
from ...core.vocabulary.run_files import (
    FAILURE,
    GENERATIONS,
    INTERRUPTED,
    METRICS,
    RUN,
    STALL,
    SUMMARY,
    events_path,
)
from ...core.vocabulary.text import who_failed
from .clock import common_clock
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
    notes += _note_restarts(facts)
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


def _note_restarts(facts: Mapping[str, Any]) -> list[str]:
    """Say how often a run was started again, and why the last time."""
    with contextlib.suppress(TypeError, KeyError, IndexError):
        count, last = len(facts["restarts"]), facts["restarts"][-1]
        why = who_failed(last["rank"], last["host"], last["step"], last["cause"])
        times = "once" if count == 1 else f"{count} times, the last time"
        return [f"started again {times} because {why}; figures are of the time since, {GENERATIONS}/ has the rest"]
    return []


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


# Whether a run has ended, and how that is known, from what its directory holds.
#
# [Note: when a run has ended] The launcher leaves ``summary.json`` or ``failure.json`` when it is done. Started
# some other way, a run has ended when none of its processes lives any more, as far as they are of this host, or
# when nothing was recorded for `SILENT_SECONDS`.


SILENT_SECONDS = 600.0


def why_ended(run_directory: Path, now: float) -> str:
    """Return how it is known that the run has ended; empty while it goes on. See [Note: when a run has ended]."""
    if (run_directory / FAILURE).exists():
        return "the run has failed"
    if (run_directory / SUMMARY).exists():
        return "the run has ended"
    events = list(run_directory.glob("events-rank*.jsonl"))
    heads = [_head(path) for path in events]
    here = socket.gethostname()
    if heads and all(head is not None and head[0] == here for head in heads):
        if not any(_lives(head[1]) for head in heads if head is not None):
            return "the run has ended: none of its processes is there any more"
        return ""
    newest = max((_changed(path) for path in (*events, run_directory / METRICS, run_directory / RUN)), default=0.0)
    if newest and now - newest > SILENT_SECONDS:
        return f"nothing was recorded for {now - newest:.0f} s: the run is taken for ended"
    return ""


def note_killed(run_directory: Path, now: float) -> list[str]:
    """Say that a run was ended before it could say how it ended; nothing while it goes on, or of imported ones."""
    done = any((run_directory / name).exists() for name in (FAILURE, SUMMARY))
    if done or not (run_directory / RUN).exists():
        return []
    heads = [_head(path) for path in run_directory.glob("events-rank*.jsonl")]
    if not any(head is not None and head[1] > 0 for head in heads) or not why_ended(run_directory, now):
        return []
    return [
        f"the run left neither {SUMMARY} nor {FAILURE}: it was killed, or its launcher was. "
        f"This is what was written until then"
    ]


def how_it_failed(run_directory: Path) -> str:
    """Return which rank of a run failed, and how; empty where none did, or where that cannot be read."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        values = json.loads((run_directory / FAILURE).read_text(encoding="utf-8", errors="replace"))
        return who_failed(values["rank"], values["host"], values.get("step"), values["cause"])
    return ""


def how_it_hung(run_directory: Path) -> str:
    """Return where the ranks stood in a run that ended while it hung; empty for others."""
    from ...core.failures import Position, describe, remedy

    for name, is_hang in ((INTERRUPTED, "hanging"), (STALL, "positions")):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            values = json.loads((run_directory / name).read_text(encoding="utf-8"))
            found = [Position.from_json(json.dumps(each)) for each in values["positions"] if values[is_hang]]
            positions = [position for position in found if position is not None]
            if positions:
                step = max(position.step for position in positions)
                when = f"after step {step}" if step else "before the first step was done"
                todo = remedy(positions)
                return f"The run hung {when}: {describe(positions, past=True)}" + (f"; {todo}." if todo else ".")
    return ""


def _head(path: Path) -> tuple[str, int] | None:
    """Return host and process id of who writes an events file."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            values = json.loads(file.readline(65536))
        return str(values["host"]), int(values["process_id"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _lives(process_id: int) -> bool:
    if process_id <= 0:
        return False
    try:
        os.kill(process_id, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


# The newest run below ``runs/``, where ``farandole run`` keeps them by default.

RUNS = Path("runs")


def newest_run() -> Path:
    """Return the run that was started last. Raises `DataError` where there is none."""
    found = runs_by_start()
    if not found:
        raise DataError(f"no RUN was given, and {RUNS}/ holds none", remedy="name a run directory")
    return found[-1]


def runs_by_start() -> list[Path]:
    """Return the runs, the one that was started last at the end."""
    started: list[tuple[float, Path]] = []
    for path in RUNS.glob(f"*/{RUN}"):
        with suppress(OSError):  # it was removed meanwhile
            started.append((path.stat().st_mtime, path.parent))
    return [path for _, path in sorted(started)]
