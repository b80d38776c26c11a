"""Traces of other tools as run directories: whatever reads a run of ours then reads theirs.

::

    import_traces([Path("rank0.pt.trace.json"), Path("rank1.pt.trace.json")], Path("runs/theirs"))
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from ...core import run_files
from ...core.errors import ConfigError, DataError
from ...core.names import did_you_mean
from .foreign_rank import ForeignRank
from .horovod import is_horovod, read_horovod
from .kineto import is_kineto, read_kineto
from .trace_text import Trace, read_trace_text
from .write import write_ranks

KINETO, HOROVOD = "kineto", "horovod"
KINDS: dict[str, tuple[Callable[[Trace], bool], Callable[[Trace, int], ForeignRank]]] = {
    KINETO: (is_kineto, read_kineto),
    HOROVOD: (is_horovod, read_horovod),
}
"""How to tell each kind, and how to read a file of it; the number is the rank of one that does not say its own."""


def import_traces(paths: Sequence[Path], out: Path, *, kind: str | None = None) -> list[str]:
    """Make the run directory `out` of traces, one a rank; return what is missing or was guessed, in words.

    With `kind` None each file says itself what it is. Raises `DataError` for files that cannot be read, are none
    of the kinds, of one rank twice or of different kinds; `ConfigError` when `out` holds something already.
    """
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"unknown kind of trace {kind!r}", remedy=did_you_mean(kind, KINDS))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already", remedy="choose another name with -o RUN, or remove it")
    if not paths:
        raise DataError("no trace to import", remedy="name the files of the ranks")
    kinds, ranks = set[str](), list[ForeignRank]()
    for position, path in enumerate(paths):
        trace = read_trace_text(path)
        found = kind or _kind_of(trace)
        kinds.add(found)
        ranks.append(KINDS[found][1](trace, position))
    if len(kinds) > 1:
        raise DataError(f"the files are of different kinds: {', '.join(sorted(kinds))}", remedy="import one kind")
    _check_ranks(ranks)
    facts = {"command": [f"(imported from {kinds.pop()})"], "imported_from": [path.name for path in paths]}
    notes = write_ranks(ranks, out, facts)
    run_files.write_private(
        out / "import.json", json.dumps({"version": 1, **facts, "notes": notes}, indent=1) + "\n"
    )
    return notes


def _kind_of(trace: Trace) -> str:
    for name, (is_kind, _) in KINDS.items():
        if is_kind(trace):
            return name
    raise DataError(
        f"{trace.path} is neither a trace of PyTorch's profiler nor a timeline of Horovod's",
        remedy="give what torch.profiler's export_chrome_trace or HOROVOD_TIMELINE wrote",
    )


def _check_ranks(ranks: Sequence[ForeignRank]) -> None:
    owners: dict[int, Path] = {}
    for rank in ranks:
        if rank.rank in owners:
            raise DataError(
                f"{owners[rank.rank]} and {rank.path} are both of rank {rank.rank}, expected one file a rank",
                remedy="leave one out",
            )
        owners[rank.rank] = rank.path
