"""The newest run below ``runs/``, where ``farandole run`` keeps them by default."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ...core.vocabulary.errors import DataError
from ...core.vocabulary.run_files import RUN

RUNS = Path("runs")


def newest_run(runs: Path = RUNS) -> Path:
    """Return the run in `runs` that was started last. Raises `DataError` where there is none."""
    found = runs_by_start(runs)
    if not found:
        raise DataError(f"no RUN was given, and {runs}/ holds none", remedy="name a run directory")
    return found[-1]


def runs_by_start(runs: Path = RUNS) -> list[Path]:
    """Return the runs in `runs`, the one that was started last at the end."""
    started: list[tuple[float, Path]] = []
    for path in runs.glob(f"*/{RUN}"):
        with suppress(OSError):  # it was removed meanwhile
            started.append((path.stat().st_mtime, path.parent))
    return [path for _, path in sorted(started)]
