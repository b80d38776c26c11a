"""`fd.print`: lines of rank 0 alone, or of every rank with its number."""

from __future__ import annotations

import io
import sys
from typing import IO, Any

from ..comm.world.world import has_world, world
from ..core.launchers.rank_variables import read_rank_variables


def print(  # noqa: A001 - the field's name; fd.print replaces print
    *values: Any,
    sep: str | None = " ",
    end: str | None = "\n",
    file: IO[str] | None = None,
    flush: bool = True,
    all_ranks: bool = False,
) -> None:
    """Print on rank 0 only, or on all ranks with the rank in front of each line.

    May be called by any rank at any time: it sends nothing. Before `init` and after `shutdown` the launcher's
    variables say which rank this is.

    Args:
        values: what to print, as for the built-in ``print``; `sep`, `end` and `file` as there.
        flush: write at once.
        all_ranks: print on every rank, as ``rank 1: text``.
    """
    rank = _rank()
    if rank and not all_ranks:
        return
    text = io.StringIO()
    text.write((" " if sep is None else sep).join(map(str, values)))
    text.write("\n" if end is None else end)
    said = text.getvalue()
    if all_ranks:
        said = "".join(f"rank {rank}: {line}" for line in said.splitlines(keepends=True))
    stream = sys.stdout if file is None else file
    if stream is None:  # a process without standard output
        return
    stream.write(said)  # in one piece, so that lines of ranks do not mix
    if flush:
        stream.flush()


def _rank() -> int:
    if has_world():
        return world().rank
    variables = read_rank_variables()
    return 0 if variables is None else variables.rank
