"""A service for tests: adds up what it is given, and remembers in which order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from farandole.core.vocabulary.errors import ConfigError
from farandole.sync.server.channel import ServerMessage


class Ledger:
    """Sums tensors. A read of ``at_least`` entries waits for them."""

    is_behind = False

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.total = torch.zeros(config["elements"], dtype=torch.float64)
        self.entries: list[list[int]] = []
        self.left: list[int] = []
        self.waits: dict[int, int] = {}

    def handle(self, client: int, request: ServerMessage) -> ServerMessage | None:
        if request.values["do"] == "add":
            self.total = self.total + request.tensors[0]
            self.entries.append([client, request.values["entry"]])
            return ServerMessage({"count": len(self.entries)})
        if request.values["do"] == "fail":
            raise ConfigError("it was asked to", remedy="do not ask")
        if request.values["do"] == "die":
            raise OSError("no space left on the device")
        self.waits[client] = request.values["at_least"]
        return None

    def due(self) -> Sequence[tuple[int, ServerMessage]]:
        ready = [client for client, least in self.waits.items() if len(self.entries) >= least]
        for client in ready:
            del self.waits[client]
        return [
            (client, ServerMessage({"entries": self.entries, "left": self.left}, [self.total])) for client in ready
        ]

    def client_left(self, client: int) -> None:
        self.left.append(client)

    def state(self) -> ServerMessage:
        return ServerMessage({"entries": list(self.entries), "left": list(self.left)}, [self.total])

    def load(self, state: ServerMessage) -> None:
        self.total = state.tensors[0].clone()
        self.entries, self.left = list(state.values["entries"]), list(state.values["left"])
