"""The report while the run goes on: written again every few seconds, until the run has ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from ...core.vocabulary.errors import ConfigError, DataError
from ...core.vocabulary.run_files import REPORT
from ..read.run_end import why_ended
from .page import write_report


def watch_report(
    run_directory: Path,
    output: Path | None = None,
    *,
    baseline: Path | None = None,
    every_seconds: float = 5.0,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """Write the report now and every so often until the run has ended; return where it is.

    The page reloads itself meanwhile; the last one written does not, however the watching ends. `say` is told
    where the page is, once, and why the watching ended. Raises as `write_report`.
    """
    if not every_seconds >= 0.5:
        raise ConfigError(f"{every_seconds:g} seconds between two pages: expected at least 0.5")
    said = False
    try:
        while True:
            began = time.time()
            ended = why_ended(run_directory, began)
            if ended:
                break
            try:
                path = write_report(
                    run_directory, output, baseline=baseline, refresh_seconds=max(1.0, every_seconds)
                )
                if not said:
                    said = True
                    say(f"{path} is kept up to date; Ctrl-C ends it")
            except DataError:
                # A directory made a moment ago holds nothing yet.
                if not run_directory.is_dir() or said:
                    raise
            # A long run takes long to read: leave at least as much time to the run as reading took.
            time.sleep(max(every_seconds, time.time() - began))
    except KeyboardInterrupt:
        # The page may exist although its path was not printed yet.
        if (output if output is not None else run_directory / REPORT).exists():
            with contextlib.suppress(DataError):
                write_report(run_directory, output, baseline=baseline)
        raise
    path = write_report(run_directory, output, baseline=baseline)
    say(ended)
    return path
