"""Copies of a table that serve: they take the rows that were trained since the last time, and no others."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from ...core.vocabulary.errors import ConfigError
from ..server.message import ServerMessage
from .index import IdIndex
from .links import RowLinks

Mark = tuple[tuple[int, int], ...]
"""By server which life of its table it was, and the version. A restored server applies pushes that come again in
another order, so its versions are those of another life."""


@dataclass(frozen=True)
class RowChanges:
    """Rows that were trained since a mark."""

    ids: torch.Tensor
    """(changed,), int64."""
    rows: torch.Tensor
    """(changed, dim)."""
    removed: torch.Tensor
    """Ids that have no row any more."""
    is_whole: bool
    """These are all rows: what a copy had before is void."""
    since: Mark | None
    """The mark from which on these are the changes."""
    mark: Mark
    """For the next call."""
    at_seconds: float
    """When they were asked for, by `time.monotonic`: rows have all that was applied before."""

    @property
    def nbytes(self) -> int:
        """Bytes of ids and rows."""
        return self.ids.nbytes + self.rows.nbytes + self.removed.nbytes


def read_changes(links: RowLinks, mark: Mark | None) -> RowChanges:
    """Ask all servers. Raises `ConfigError` for a mark of another number of servers."""
    if mark is not None and len(mark) != links.count:
        raise ConfigError(
            f"a mark of {len(mark)} servers, but the table has {links.count}", remedy="begin with None"
        )
    began = time.monotonic()
    nothing: Mark = ((-1, -1),) * links.count
    replies = _ask(links, nothing if mark is None else mark)
    if mark is not None and any(each.values["whole"] for each in replies):
        replies = _ask(links, nothing)  # a copy begins anew as a whole: shards do not know its ids
    return RowChanges(
        torch.cat([each.tensors[0] for each in replies]), torch.cat([each.tensors[1] for each in replies]),
        torch.cat([each.tensors[2] for each in replies]), all(each.values["whole"] for each in replies),
        mark, tuple((each.values["life"], each.values["version"]) for each in replies), began,
    )  # fmt: skip


def _ask(links: RowLinks, since: Mark) -> list[ServerMessage]:
    requests = {
        number: ServerMessage({"do": "changes", "life": life, "since": version})
        for number, (life, version) in enumerate(since)
    }
    replies = links.call(requests, keeps=False)
    return [replies[number] for number in range(links.count)]


class RowCopy(nn.Module):
    """Rows of a table in this process, to look up and not to train. Ids without a row are zeros.

    Args:
        dim: numbers of a row.
        dtype: of the copied rows, whatever that of the table is.
    """

    def __init__(self, dim: int, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self._rows = torch.zeros(0, dim, dtype=dtype)
        self._index, self._count = IdIndex(), 0
        self._at_seconds = float("-inf")
        self.mark: Mark | None = None
        """What the next `changes_since` is asked for."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._index)

    @property
    def age_seconds(self) -> float:
        """A bound: every change that was applied longer ago is in this copy."""
        return time.monotonic() - self._at_seconds

    def update(self, changes: RowChanges) -> None:
        """Take changes since `mark`; all of them or none.

        Raises `ConfigError` for rows of another dim, and changes that are not those since `mark`.
        """
        if changes.rows.shape[1] != self._rows.shape[1]:
            raise ConfigError(f"rows of {changes.rows.shape[1]}, but the copy has dim = {self._rows.shape[1]}")
        if not changes.is_whole and changes.since != self.mark:
            raise ConfigError(
                f"changes since {changes.since}, but the copy is of {self.mark}, so it would miss some",
                remedy="copy.update(table.changes_since(copy.mark)), each time",
            )
        if changes.is_whole:
            self._index, self._count = IdIndex(), 0
        ids = changes.ids.numpy()
        places = self._index.find(ids)
        new = np.flatnonzero(places < 0)
        places[new] = np.arange(self._count, self._count + len(new))
        self._count += len(new)
        if self._count > len(self._rows):
            grown = torch.zeros(max(2 * len(self._rows), self._count), self._rows.shape[1], dtype=self._rows.dtype)
            grown[: len(self._rows)] = self._rows
            self._rows = grown
        self._index.add(ids[new], places[new])
        self._rows[torch.from_numpy(places)] = changes.rows.to(self._rows.dtype)
        gone = self._index.find(changes.removed.numpy())
        self._rows[torch.from_numpy(gone[gone >= 0])] = 0
        self.mark, self._at_seconds = changes.mark, changes.at_seconds

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of `ids`, integers of any shape, as shape + (dim,)."""
        places = self._index.find(ids.reshape(-1).long().numpy())
        if not len(self._rows):
            return torch.zeros(*ids.shape, self._rows.shape[1], dtype=self._rows.dtype)
        found = self._rows[torch.from_numpy(np.maximum(places, 0))]
        found[torch.from_numpy(places < 0)] = 0
        return found.view(*ids.shape, -1)
