"""Tables in a checkpoint: which ones, what `fd.save` and `fd.load` ask them for, and which are left out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ...checkpoint.manifest import decode
from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...core.vocabulary.errors import CheckpointError
from ...core.vocabulary.text import write_notice
from .table import JobTables, RowTable


@dataclass(frozen=True)
class TableState:
    """The rows of one table: rank 0 has all of them while it saves or loads."""

    table: RowTable
    here: World

    def meet(self) -> None:
        """Wait until all ranks are here: what they pushed before is in the rows."""
        if self.here.size > 1:
            all_gather_json(self.here, f"rows of {self.table.name} to save", "")

    def read(self) -> dict[str, torch.Tensor]:
        """Return all rows on rank 0, and nothing elsewhere; right after `meet`."""
        return self.table.snapshot() if self.here.rank == 0 else {}

    def write(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Replace all rows by rank 0's `saved`; to be called by all ranks. Raises on all of them or on none."""
        self.table.restore(saved)


def tables_in(modules: Iterable[nn.Module], here: World) -> dict[str, TableState]:
    """Return the tables that `modules` are or have, by their own names.

    Raises `CheckpointError` for two of one name.
    """
    found: dict[str, TableState] = {}
    for module in modules:
        for each in module.modules():
            if isinstance(each, RowTable):
                if each.name in found and found[each.name].table is not each:
                    raise CheckpointError(
                        f"two tables are named {each.name!r}, and a checkpoint has tables by name",
                        is_input=True,
                        remedy="give them names of their own",
                    )
                found[each.name] = TableState(each, here)
    return found


@dataclass(frozen=True)
class SavedTables:
    """What of a checkpoint goes into tables: its first rank's rows, by the first rank here."""

    tables: Mapping[str, TableState]
    """Those that are to be loaded."""
    saved: Mapping[str, Any]
    """The encoded rows that the checkpoint has, by table."""
    here: World

    def missing(self) -> list[str]:
        """Return the tables that the checkpoint has not."""
        return [name for name in self.tables if name not in self.saved]

    def wanted(self) -> list[Any]:
        """Return what this rank needs of the checkpoint, encoded."""
        return [self.saved[name] for name in self.tables if self.here.rank == 0]

    def writes(self, restore: Callable[..., Any]) -> dict[str, Callable[[], None]]:
        """Return, by table, what all ranks are to call. Raises for what cannot be decoded."""
        tell_left_out(self.here, self.tables.keys(), saved=self.saved.keys())
        rows = {name: decode(self.saved[name], restore) if self.here.rank == 0 else {} for name in self.tables}
        return {name: partial(each.write, rows[name]) for name, each in self.tables.items()}


@dataclass(eq=False)
class _Told:
    texts: set[str] = field(default_factory=set)


def tell_left_out(here: World, given: Collection[str], *, saved: Collection[str] | None = None) -> None:
    """Say once, on rank 0, which tables a save leaves out; with `saved` of a checkpoint, which a load does."""
    job = here.session.kept(JobTables)
    left = set() if job is None else {each.name for each in job.tables} - set(given)
    left |= set(saved or ()) - set(given)
    names = ", ".join(sorted(left))
    text = (
        f"the checkpoint is without the rows of {names}: give fd.save the table, too, such as users=users"
        if saved is None
        else f"the rows of {names} are as they were: give fd.load the table, too, such as users=users"
    )
    told = here.session.keep(_Told, _Told).texts
    if left and text not in told and here.rank == 0:
        write_notice(text)
    told.add(text)
