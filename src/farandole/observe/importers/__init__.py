"""Traces of other tools as run directories: whatever reads a run of ours then reads theirs.

::

    import_traces([Path("rank0.pt.trace.json"), Path("rank1.pt.trace.json")], Path("runs/theirs"))
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

from ...core.vocabulary import run_files
from ...core.vocabulary.errors import ConfigError, DataError
from ...core.vocabulary.suggestions import did_you_mean
from .foreign_rank import ForeignRank
from .horovod import HorovodReader
from .kineto import KinetoReader
from .trace_text import Trace
from .write import write_ranks

KINETO, HOROVOD = "kineto", "horovod"
_SAMPLE = 10_000
"""By how many events a file without a head says what it is."""


class Reader(Protocol):
    """Takes a trace of one kind, event by event, and keeps what steps are made of."""

    @property
    def keys(self) -> Collection[str]:
        """What is read of what stands beside the events."""

    def is_mine(self, event: dict[str, Any]) -> bool:
        """Return whether only this kind has such an event."""

    def is_my_head(self, head: dict[str, Any]) -> bool:
        """Return whether only this kind has such keys beside the events."""

    def take(self, event: dict[str, Any]) -> None:
        """Take one event."""

    def finish(self, trace: Trace, position: int) -> ForeignRank:
        """Return the rank of a trace whose events were all taken; raise `DataError` if there is nothing in it."""


KINDS: dict[str, Callable[[], Reader]] = {KINETO: KinetoReader, HOROVOD: HorovodReader}
"""Readers by kind; of a file that could be of several, the first that says so has it."""


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
        found, rank = _read(path, position, list(KINDS) if kind is None else [kind])
        kinds.add(found)
        ranks.append(rank)
    if len(kinds) > 1:
        raise DataError(f"the files are of different kinds: {', '.join(sorted(kinds))}", remedy="import one kind")
    _check_ranks(ranks)
    facts = {"command": [f"(imported from {kinds.pop()})"], "imported_from": [path.name for path in paths]}
    notes = write_ranks(ranks, out, facts)
    run_files.write_private(
        out / "import.json", json.dumps({"version": 1, **facts, "notes": notes}, indent=1) + "\n"
    )
    return notes


def _read(path: Path, position: int, kinds: Sequence[str]) -> tuple[str, ForeignRank]:
    """Read a file of one of these kinds, in one go: it may be a pipe. Return which it is, and the rank."""
    readers = {name: KINDS[name]() for name in kinds}
    trace = Trace(path, {key for reader in readers.values() for key in reader.keys})
    said: set[str] = set(kinds) if len(kinds) == 1 else set()
    for number, event in enumerate(trace.events()):
        if len(readers) > 1 and number < _SAMPLE:
            said |= {name for name, reader in readers.items() if reader.is_mine(event)}
            said |= {name for name, reader in readers.items() if reader.is_my_head(trace.head)}
            if kinds[0] in said:
                readers = {kinds[0]: readers[kinds[0]]}
        for reader in readers.values():
            reader.take(event)
    said |= {name for name, reader in readers.items() if reader.is_my_head(trace.head)}
    for name, reader in readers.items():
        if name in said:
            return name, reader.finish(trace, position)
    raise DataError(
        f"{path} is neither a trace of PyTorch's profiler nor a timeline of Horovod's",
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
