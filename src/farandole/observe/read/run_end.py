"""Whether a run has ended, and how that is known, from what its directory holds.

[Note: when a run has ended] The launcher leaves ``summary.json`` or ``failure.json`` when it is done. Started
some other way, a run has ended when none of its processes lives any more, as far as they are of this host, or when
nothing was recorded for `SILENT_SECONDS`.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from ...core.vocabulary.run_files import FAILURE, METRICS, RUN, SUMMARY

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
