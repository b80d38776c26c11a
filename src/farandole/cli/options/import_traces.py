"""What ``farandole import`` and ``farandole report --from`` share: the kinds of traces, and a run made of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...core.vocabulary.notice import write_notice

KINDS = ("kineto",)


def import_with_notes(files: Sequence[Path], out: Path) -> list[str]:
    """Make the run directory `out` of the traces; say on the standard error what is missing, and return it."""
    from ...observe.importers import import_traces

    notes = import_traces(files, out)
    for note in notes:
        write_notice(note)
    return notes


def import_into_new_run(files: Sequence[Path]) -> Path:
    """Make a fresh run directory below ``runs/`` of the traces; none is left when they are unsound."""
    from ...launch.job.run_directory import make_run_directory

    out = make_run_directory(None, "imported-kineto")
    try:
        import_with_notes(files, out)
    except BaseException:
        if not any(out.iterdir()):
            out.rmdir()
        raise
    return out
