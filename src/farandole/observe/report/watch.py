"""The report while the run goes on: written again every few seconds, until the run has ended.

[Note: when a run has ended] The launcher leaves ``summary.json`` or ``failure.json`` when it is done. Started
some other way, a run has ended when none of its processes lives any more, as far as they are of this host, or when
nothing was recorded for `SILENT_SECONDS`.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import ConfigError, DataError
from ...core.run_files import METRICS, RUN, SUMMARY
from .page import write_report
from .run import FAILURE

SILENT_SECONDS = 600.0


@dataclass(frozen=True)
class Clock:
    """Where the time comes from, and how it passes."""

    now: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


def watch_report(
    run_directory: Path,
    output: Path | None = None,
    *,
    baseline: Path | None = None,
    every_seconds: float = 5.0,
    say: Callable[[str], None] = lambda line: None,
    clock: Clock | None = None,
) -> Path:
    """Write the report now and every so often until the run has ended; return where it is.

    The page reloads itself meanwhile; the last one written does not, however the watching ends. `say` is told
    where the page is, once, and why the watching ended. Raises as `write_report`.
    """
    if not every_seconds >= 0.5:
        raise ConfigError(f"{every_seconds:g} seconds between two pages: expected at least 0.5")
    clock = clock if clock is not None else Clock()
    said = False
    try:
        while True:
            began = clock.now()
            ended = why_ended(run_directory, began)
            if ended:
                break
            try:
                path = write_report(
                    run_directory, output, baseline=baseline, refresh_seconds=max(1.0, every_seconds)
                )
                if not said:
                    say(f"{path} is kept up to date; Ctrl-C ends it")
                    said = True
            except DataError:
                # A directory made a moment ago holds nothing yet.
                if not run_directory.is_dir() or said:
                    raise
            # A long run takes long to read: leave at least as much time to the run as reading took.
            clock.sleep(max(every_seconds, clock.now() - began))
    except KeyboardInterrupt:
        if said:
            write_report(run_directory, output, baseline=baseline)
        raise
    path = write_report(run_directory, output, baseline=baseline)
    say(ended)
    return path


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
