"""All tables of a job as one service of each server: a table is opened by its name, alike on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ...core.vocabulary.errors import FarandoleError, Mismatch
from ..server.channel import ServerMessage
from .service import RowService

SERVICE: Final = "tables"


class TablesService:
    """See `RowService`, one for each name. Config: ``ranks``."""

    is_behind = False

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._ranks = set(config["ranks"])
        self._tables: dict[str, RowService] = {}
        self._configs: dict[str, dict[str, Any]] = {}

    def handle(self, client: int, request: ServerMessage) -> ServerMessage | None:
        """Open a ``table``, or let it carry out the request."""
        name = request.values["table"]
        if request.values["do"] == "open":
            self._open(client, name, request.values["config"])
            return ServerMessage({})
        return self._tables[name].handle(client, request)

    def due(self) -> Sequence[tuple[int, ServerMessage | FarandoleError]]:
        """Return the pulls whose round is complete."""
        return [each for table in self._tables.values() for each in table.due()]

    def client_left(self, client: int) -> None:
        """Wait no more for this rank, in any table."""
        self._ranks.discard(client)
        for table in self._tables.values():
            table.client_left(client)

    def state(self) -> ServerMessage:
        """Return all tables, in tensors of their own."""
        states = {name: table.state() for name, table in self._tables.items()}
        said = [[name, self._configs[name], each.values, len(each.tensors)] for name, each in states.items()]
        return ServerMessage(
            {"tables": said, "ranks": sorted(self._ranks)}, [t for s in states.values() for t in s.tensors]
        )

    def load(self, state: ServerMessage) -> None:
        """Go on from `state`."""
        begin = 0
        for name, config, values, count in state.values["tables"]:
            self._tables[name], self._configs[name] = RowService(config), config
            self._tables[name].load(ServerMessage(values, state.tensors[begin : begin + count]))
            begin += count
        self._ranks = set(state.values["ranks"])

    def _open(self, client: int, name: str, config: Mapping[str, Any]) -> None:
        if name not in self._tables:
            self._configs[name] = dict(config)
            self._tables[name] = RowService(config)
            for gone in set(config["ranks"]) - self._ranks:
                self._tables[name].client_left(gone)
        elif self._configs[name] != config:
            raise Mismatch(
                f"table {name!r} is made in two ways: {config} and {self._configs[name]}",
                rank=client,
                operation="rows",
                remedy="make it with the same arguments on all ranks, and give two tables two names",
            )
