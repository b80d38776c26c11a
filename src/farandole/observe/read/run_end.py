"""Whether a run has ended, and how that is known, from what its directory holds.

[Note: when a run has ended] The launcher leaves ``summary.json`` or ``failure.json`` when it is done. Started
some other way, a run has ended when none of its processes lives any more, as far as they are of this host, or when
nothing was recorded for `SILENT_SECONDS`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from contextlib import suppress
from pathlib import Path

from ...core.vocabulary.errors import DataError
from ...core.vocabulary.rank_lists import who_failed
from ...core.vocabulary.run_files import FAILURE, INTERRUPTED, METRICS, RUN, STALL, SUMMARY

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
