"""Traces of PyTorch's profiler as run directories: whatever reads a run of ours then reads theirs.

::

    import_traces([Path("rank0.pt.trace.json"), Path("rank1.pt.trace.json")], Path("runs/theirs"))
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ...core.vocabulary import run_files
from ...core.vocabulary.errors import ConfigError, DataError
from .foreign_rank import ForeignRank
from .kineto import read_kineto
from .write import write_ranks


def import_traces(paths: Sequence[Path], out: Path) -> list[str]:
    """Make the run directory `out` of traces, one a rank; return what is missing or was guessed, in words.

    Raises `DataError` for files that cannot be read, are no traces, or of one rank twice; `ConfigError` when `out`
    holds something already.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already", remedy="choose another name with -o RUN, or remove it")
    if not paths:
        raise DataError("no trace to import", remedy="name the files of the ranks")
    ranks = [read_kineto(path, position) for position, path in enumerate(paths)]
    _check_ranks(ranks)
    facts = {"command": ["(imported from kineto)"], "imported_from": [path.name for path in paths]}
    notes = write_ranks(ranks, out, facts)
    run_files.write_private(
        out / "import.json", json.dumps({"version": 1, **facts, "notes": notes}, indent=1) + "\n"
    )
    return notes


def _check_ranks(ranks: Sequence[ForeignRank]) -> None:
    owners: dict[int, Path] = {}
    for rank in ranks:
        if rank.rank in owners:
            raise DataError(
                f"{owners[rank.rank]} and {rank.path} are both of rank {rank.rank}, expected one file a rank",
                remedy="leave one out",
            )
        owners[rank.rank] = rank.path
