"""The newest run below ``runs/``, where ``farandole run`` keeps them by default."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ...core.vocabulary.errors import DataError
from ...core.vocabulary.run_files import RUN

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
