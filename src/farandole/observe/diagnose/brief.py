"""The verdict on a run in one line, for its closing summary: only where it costs next to nothing."""

from __future__ import annotations

from pathlib import Path

from ...core.vocabulary.errors import FarandoleError
from .verdict import diagnose

MOST_BYTES = 2 * 2**20
"""Records that are read in about a second; those of longer runs are left to ``farandole diagnose``."""


def brief_verdict(run_directory: Path) -> str:
    """Return the verdict of `diagnose`; empty where there is none, or the records are too long to read now."""
    try:
        if sum(path.stat().st_size for path in run_directory.glob("events-rank*.jsonl")) > MOST_BYTES:
            return ""
        diagnosis = diagnose(run_directory)
    except (FarandoleError, OSError):
        return ""
    return diagnosis.verdict if diagnosis.steps_looked_at else ""
