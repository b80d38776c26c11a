"""What a table asks: the servers of the job, or, for one process alone, shards in that process. One interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from ...comm.world.world import World
from ...core.vocabulary.errors import ConfigError, FarandoleError
from ..server.channel import ServerMessage
from ..server.client import wait_for
from ..server.dense.connect import ServerConnections, ServerLayout, start_and_connect
from .service import SERVICE, RowService, TablesService

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
