"""A table in a checkpoint: what `fd.save` asks it for, and which tables of the job a checkpoint leaves out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...core.vocabulary.notice import write_notice
from .table import JobTables, RowTable


@dataclass(frozen=True)
class TableState:
    """The rows of one table, with `state_dict` and `load_state_dict`: rank 0 has them, and gives them back."""

    table: RowTable
    here: World

    def meet(self) -> None:
        """Wait until all ranks are here: what they pushed before is in the rows."""
        if self.here.size > 1:
            all_gather_json(self.here, f"rows of {self.table.name} to save", "")

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return all rows on rank 0, and nothing elsewhere; right after `meet`."""
        return self.table.snapshot() if self.here.rank == 0 else {}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace all rows by rank 0's `state`; to be called by all ranks. Raises `ConfigError`, on all."""
        self.table.restore(state)


def tables_in(modules: Mapping[str, nn.Module]) -> dict[str, RowTable]:
    """Return the tables that `modules` are or have, by their names there: "users", "model.users"."""
    return {
        ".".join(filter(None, (name, path))): each
        for name, module in modules.items()
        for path, each in module.named_modules()
        if isinstance(each, RowTable)
    }


@dataclass(eq=False)
class _Told:
    names: set[str] = field(default_factory=set)


def tell_left_out(here: World, saved: Iterable[RowTable]) -> None:
    """Say once, on rank 0, which tables of the job a checkpoint has not."""
    job, told = here.session.kept(JobTables), here.session.keep(_Told, _Told).names
    left = [] if job is None else sorted(job.names - told - {each.name for each in saved})
    told.update(left)
    if left and here.rank == 0:
        write_notice(
            f"the checkpoint is without the rows of {', '.join(left)}: give fd.save and fd.load the table, too, "
            "such as users=users"
        )
