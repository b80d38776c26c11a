"""What a table asks: the servers of the job, or, for one process alone, shards in that process. One interface."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import nn

from ...comm.world.world import World
from ...core.vocabulary.errors import ConfigError, FarandoleError
from ..server.channel import ServerMessage
from ..server.client import wait_for
from ..server.dense.connect import ServerConnections, ServerLayout, start_and_connect
from .service import SERVICE, RowService, TablesService
from .store import RowStore, read_ids

MOST_MESSAGE_BYTES: Final = 64 << 20
"""Tensors of a request or a reply; more rows go in several."""
SNAPSHOT_SECONDS: Final = 60.0
_KEPT_BYTES: Final = 256 << 20


class RowLinks(Protocol):
    """Requests to shards, by number."""

    count: int

    def call(self, requests: Mapping[int, ServerMessage], *, keeps: bool) -> dict[int, ServerMessage]:
        """Return the replies; `keeps`: the requests change something."""


class LocalShards:
    """Shards in this process, for one rank without servers."""

    def __init__(self, config: Mapping[str, Any], shards: int) -> None:
        self.count = shards
        self.services = [RowService(config) for _ in range(shards)]

    def call(self, requests: Mapping[int, ServerMessage], *, keeps: bool) -> dict[int, ServerMessage]:
        """See `RowLinks`."""
        replies, problem = {}, None
        for number, request in requests.items():
            try:
                reply = self.services[number].handle(0, request)
            except FarandoleError as found:  # all shards hear of it
                problem = problem or found
                continue
            assert reply is not None, "one rank waits for no other"
            replies[number] = reply
        if problem is not None:
            raise problem
        return replies


@dataclass(eq=False)
class RowServers:
    """The servers of rows of one job: all its tables are there. Kept by the world's session."""

    asked: int
    """How many servers were asked for; 0: one on each host."""
    connections: ServerConnections
    names: set[str] = field(default_factory=set)
    """Tables that this rank has made."""

    @classmethod
    def of(cls, here: World, servers: int) -> RowServers:
        """Return the job's, started at the first call; to be called by all ranks."""
        made = here.session.kept(cls)
        if made is None:
            config = {"ranks": list(range(here.size))}
            hosted = {SERVICE: {"class": f"{TablesService.__module__}:TablesService", "config": config}}
            layout = ServerLayout(
                servers, lambda number, directory: hosted, SNAPSHOT_SECONDS, 2 * MOST_MESSAGE_BYTES, _KEPT_BYTES
            )
            connections = start_and_connect(here, layout)
            made = here.session.keep(cls, lambda: cls(servers, connections))
            here.session.call_on_close(made.close)
            here.session.call_in_forked_child(made.forget)
        elif servers not in (0, made.asked):
            raise ConfigError(
                f"a table with servers = {servers}, but those of this job have {len(made.connections.clients)}",
                remedy="give all tables the same number of servers, or the first one alone",
            )
        return made

    def close(self) -> None:
        """Leave the servers."""
        self.connections.close()

    def forget(self) -> None:
        """In a forked child: close its copies of the connections."""
        self.connections.forget()


class ServerShards:
    """The shards of one table on the servers of the job."""

    def __init__(self, servers: RowServers, name: str, config: Mapping[str, Any]) -> None:
        self._servers, self._name = servers, name
        self.count = len(servers.connections.clients)
        self.call(dict.fromkeys(range(self.count), ServerMessage({"do": "open", "config": config})), keeps=True)
        if name in servers.names:
            raise ConfigError(
                f"this job has a table {name!r}, and two would share its rows",
                remedy="use that one in both places, or give the second another name",
            )
        servers.names.add(name)

    def call(self, requests: Mapping[int, ServerMessage], *, keeps: bool) -> dict[int, ServerMessage]:
        """See `RowLinks`. Raises `CommError` where a server is gone for good, and what it refuses."""
        clients = self._servers.connections.clients
        if not clients:
            raise ConfigError(
                f"table {self._name!r} is used after fd.shutdown", remedy="make it anew after fd.init"
            )
        for number, request in requests.items():
            clients[number].ask(SERVICE, {**request.values, "table": self._name}, request.tensors, keeps=keeps)
        others = [each for number, each in enumerate(clients) if number not in requests]
        replies: Sequence[ServerMessage] = wait_for([clients[number] for number in requests], beside=others)
        return dict(zip(requests, replies, strict=True))


# Copies of a table that serve: they take the rows that were trained since the last time, and no others.


_REMOVED: Final = -1
"""In place of a version, for a row that was removed; its place is free with those of many others."""
_LEAST_COMPACTED: Final = 1024
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
        self._dim, self._dtype = dim, dtype
        self._rows, self._removed = RowStore(dim, 0, dtype), 0
        self._at_seconds = float("-inf")
        self.mark: Mark | None = None
        """What the next `changes_since` is asked for."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows) - self._removed

    @property
    def age_seconds(self) -> float:
        """A bound: every change that was applied longer ago is in this copy."""
        return time.monotonic() - self._at_seconds

    def update(self, changes: RowChanges) -> None:
        """Take changes since `mark`; all of them or none.

        Raises `ConfigError` for rows of another dim, and changes that are not those since `mark`.
        """
        if changes.rows.shape[1] != self._dim:
            raise ConfigError(f"rows of {changes.rows.shape[1]}, but the copy has dim = {self._dim}")
        if not changes.is_whole and changes.since != self.mark:
            raise ConfigError(
                f"changes since {changes.since}, but the copy is of {self.mark}, so it would miss some",
                remedy="copy.update(table.changes_since(copy.mark)), each time",
            )
        if changes.is_whole:
            self._rows = RowStore(self._dim, 0, self._dtype)
        gone = self._rows.find(changes.removed.numpy())
        gone = gone[gone >= 0]
        self._rows.values[torch.from_numpy(gone)] = 0
        self._rows.touched[gone] = _REMOVED
        ids, rows = changes.ids.numpy(), changes.rows.to(self._dtype)
        places = self._rows.find(ids)
        old, new = np.flatnonzero(places >= 0), np.flatnonzero(places < 0)
        self._rows.values[torch.from_numpy(places[old])] = rows[torch.from_numpy(old)]
        self._rows.touched[places[old]] = 0
        self._rows.add(ids[new], rows[torch.from_numpy(new)], None)
        is_removed = self._rows.touched == _REMOVED
        self._removed = int(is_removed.sum())
        if 2 * self._removed > len(self._rows) + _LEAST_COMPACTED:
            self._rows.keep(~is_removed)
            self._removed = 0
        self.mark, self._at_seconds = changes.mark, changes.at_seconds

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of `ids`, integers of any shape, as shape + (dim,), on their device.

        Raises `ConfigError` for ids that are below 0 or no integers.
        """
        flat = read_ids(ids, "the copy")
        places = self._rows.find(flat)
        if not len(self._rows):
            return torch.zeros(*ids.shape, self._dim, dtype=self._dtype, device=ids.device)
        found = self._rows.values[torch.from_numpy(np.maximum(places, 0))]
        found[torch.from_numpy(places < 0)] = 0
        return found.view(*ids.shape, -1).to(ids.device)
