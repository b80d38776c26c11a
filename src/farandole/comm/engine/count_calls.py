"""Ranks that call `fd.weight` in a step and ranks that do not: found where they meet, and named on all of them.

[Note: who weighs] The call `fd.weight` adds up the counts of all ranks, so a rank that leaves it out would go on
to the exchange of gradients while the others wait for its count, and all would wait for ever. While counts are in
use, each exchange of gradients therefore begins with the same small sum, in which the rank says that it exchanges:
who meets it in `fd.weight` knows, and so does the rank itself, when its backward pass ends. At the first call of
either in a world, ranks compare through the store which of the two it is: a job without counts pays for that
alone. Not found is a job that begins with counts later, and on some ranks only: the stall watcher names it.
"""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

from ...core.vocabulary.errors import Mismatch
from ...core.vocabulary.text import name_ranks
from ..collectives import start_all_reduce
from ..world.comm_errors import translated
from ..world.store_sync import all_gather_json
from ..world.world import World

_OPERATION = "fd.weight"


class Counts(NamedTuple):
    """Sums over the ranks."""

    total: float
    without: float
    """Ranks that gave None."""
    invalid: float
    """Ranks whose count is no number of at least 0."""


class CountCalls:
    """The calls of `fd.weight` and the exchanges of one world, which keeps it."""

    def __init__(self, here: World) -> None:
        self._here = here
        self._has_met = here.size == 1
        self._pending: list[tuple[torch.Tensor, dist.Work]] = []
        """Of exchanges that have begun: one a reducer."""

    @classmethod
    def of(cls, here: World) -> CountCalls:
        """Return that of a world."""
        return here.session.keep(cls, lambda: cls(here))

    def add_up(self, own: float, *, is_none: bool, is_invalid: bool) -> Counts:
        """Return the sums for `fd.weight`; raise `Mismatch`, on every rank, when one is at its gradients."""
        if self._here.size == 1:
            return Counts(own, float(is_none), float(is_invalid))
        self._meet(exchanges=False)
        return Counts(*self._finish(*self._start([own, float(is_none), float(is_invalid), 0.0]), exchanges=False))

    def refuse_if_others_count(self) -> None:
        """Raise `Mismatch`, on every rank, if ranks are in `fd.weight` where this one has left it out."""
        if self._here.size > 1:
            self._finish(*self._start([0.0, 0.0, 0.0, 1.0]), exchanges=True)

    def exchange_begins(self) -> None:
        """Say, while counts are in use, that this rank exchanges gradients; `hear_others` is to follow."""
        if self._here.size > 1:
            self._pending.append(self._start([0.0, 0.0, 0.0, 1.0]))

    def first_exchange(self) -> None:
        """Compare with ranks that may be in their first `fd.weight`; where all ranks are in a first exchange."""
        self._meet(exchanges=True)

    def hear_others(self) -> None:
        """Raise `Mismatch`, on every rank, if one was in `fd.weight` when the others began their exchange."""
        pending, self._pending = self._pending, []
        for sums, work in pending:
            self._finish(sums, work, exchanges=True)

    def _meet(self, *, exchanges: bool) -> None:
        if self._has_met:
            return
        self._has_met = True
        gathered = all_gather_json(self._here, f"{_OPERATION}/first", exchanges, may_be_refused=True)
        if len(set(gathered)) > 1:
            self._refuse(gathered)

    def _start(self, values: list[float]) -> tuple[torch.Tensor, dist.Work]:
        sums = torch.tensor(values, dtype=torch.float64, device=self._here.device)
        group = self._here.group
        assert group is not None, "several ranks have a group"
        with translated(self._here, _OPERATION):
            return sums, start_all_reduce(sums, group)

    def _finish(self, sums: torch.Tensor, work: dist.Work, *, exchanges: bool) -> list[float]:
        with translated(self._here, _OPERATION):
            work.wait()
        *counts, at_gradients = [float(each) for each in sums.tolist()]
        if 0 < at_gradients < self._here.size:
            self._refuse(all_gather_json(self._here, f"{_OPERATION}/calls", exchanges))
        return counts

    def _refuse(self, exchanging: list[bool]) -> NoReturn:
        """`exchanging`: by rank, whether it is at its gradients."""
        ranks = dict(zip(self._here.job_ranks, exchanging, strict=True))
        there = name_ranks([rank for rank, exchanges in ranks.items() if exchanges])
        others = name_ranks([rank for rank, exchanges in ranks.items() if not exchanges])
        raise Mismatch(
            f"{there} left out fd.weight in a step in which {others} called it",
            rank=self._here.job_rank,
            operation=_OPERATION,
            remedy="call fd.weight(count) on all ranks, the same number of times in each step",
        )
