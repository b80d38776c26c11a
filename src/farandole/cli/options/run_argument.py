"""The run that a command reads: by default the newest."""

from __future__ import annotations

from pathlib import Path

from ...core.vocabulary.notice import write_notice

NEWEST = "(default: the newest in runs/)"


def run_or_newest(name: str | None) -> Path:
    """Return the run directory `name`; the newest where none was given, which is said then."""
    if name is not None:
        return Path(name)
    from ...observe.read.run_end import newest_run

    found = newest_run()
    write_notice(f"the newest run: {found}")
    return found
