"""The services of one server, and which requests of each client they have had. No socket, no file, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ...core.framing import FrameError
from ...core.vocabulary.errors import FarandoleError
from .channel import ServerMessage, write_problem


@dataclass
class _Client:
    """What is known of a client's requests. See [Note: applied once]."""

    last: int = 0
    """The number of its last request that changed something."""
    answer: dict[str, Any] | None = None
    """What was said to that, its values or the error that it is; None: nothing yet."""
    waits: tuple[int, str, bool] | None = None
    """The request that is to be answered later: number, service, whether it changes something."""


@dataclass(eq=False)
class ServiceHost:
    """Takes requests, and returns the replies that are known."""

    services: Mapping[str, Service]
    expected: set[int]
    """Clients that have not left."""
    durable: dict[int, int] = field(default_factory=dict)
    """By client: the last request that changed something and that is in a snapshot on the disk."""
    changes: int = 0
    """Requests and departures so far that changed something."""
    has_saved: bool = False
    """Whether this process has written a snapshot."""
    _clients: dict[int, _Client] = field(default_factory=dict)

    @property
    def is_behind(self) -> bool:
        """Whether a client knows what would be lost with this process. See `Service.is_behind`."""
        return any(each.is_behind for each in self.services.values())

    def last_of(self, client: int) -> int:
        """Return the number of the last request of a client that changed something."""
        return self._clients.setdefault(client, _Client()).last

    def take(self, client: int, request: ServerMessage) -> list[tuple[int, ServerMessage]]:
        """Carry out a request; return replies, each with the client that it is for. Raises `FrameError`."""
        known = self._clients.setdefault(client, _Client())
        try:
            number, name, keeps = (
                int(request.values["seq"]),
                request.values["service"],
                bool(request.values["keeps"]),
            )
            service, values = self.services[name], request.values["values"]
        except (KeyError, TypeError, ValueError):
            raise FrameError(
                f"a request without a number, a service or values: {dict(request.values)!r:.200}"
            ) from None
        if keeps and number <= known.last:
            answer = known.answer if number == known.last else {"values": {}}
            known.waits = (number, name, True) if answer is None else None
            return [] if answer is None else [self.reply(client, number, answer)]
        if keeps:
            known.last, known.answer = number, None
            self.changes += 1
        known.waits = number, name, keeps
        try:
            reply = service.handle(client, ServerMessage(values, request.tensors))
        except FarandoleError as problem:
            return [*self._answer(client, problem), *self.due()]
        found = [] if reply is None else self._answer(client, reply)
        return [*found, *self.due()]

    def due(self) -> list[tuple[int, ServerMessage]]:
        """Return replies that were deferred and are known now."""
        return [found for name in self.services for found in self._due_of(name)]

    def leave(self, client: int) -> list[tuple[int, ServerMessage]]:
        """A client has ended, or will not come back; return replies to others that waited for it."""
        if client not in self.expected:
            return []
        self.expected.discard(client)
        self._clients.setdefault(client, _Client()).waits = None
        self.changes += 1
        for service in self.services.values():
            service.client_left(client)
        return self.due()

    def state(self) -> list[ServerMessage]:
        """Return what a snapshot must have: a message of ours, and one of each service in the order of names."""
        clients = {str(number): [each.last, each.answer] for number, each in self._clients.items()}
        own = ServerMessage(
            {"clients": clients, "expected": sorted(self.expected), "services": sorted(self.services)}
        )
        return [own, *(self.services[name].state() for name in sorted(self.services))]

    def load(self, saved: Iterable[ServerMessage]) -> None:
        """Go on from what `state` returned."""
        own, *states = saved
        self.expected = set(own.values["expected"])
        self._clients = {int(n): _Client(last, answer) for n, (last, answer) in own.values["clients"].items()}
        self.durable = {number: each.last for number, each in self._clients.items()}
        for name, state in zip(own.values["services"], states, strict=True):
            self.services[name].load(state)

    def lasts(self) -> dict[int, int]:
        """Return by client the number of its last request that changed something."""
        return {number: each.last for number, each in self._clients.items()}

    def _due_of(self, name: str) -> Iterable[tuple[int, ServerMessage]]:
        for client, answer in self.services[name].due():
            waits = self._clients.setdefault(client, _Client()).waits
            if waits is not None and waits[1] == name:
                yield from self._answer(client, answer)

    def _answer(self, client: int, answer: ServerMessage | FarandoleError) -> list[tuple[int, ServerMessage]]:
        known = self._clients[client]
        assert known.waits is not None, "it asked"
        (number, name, keeps), known.waits = known.waits, None
        said: dict[str, Any]
        tensors: Sequence[torch.Tensor] = ()
        if isinstance(answer, FarandoleError):
            said = {"error": write_problem(answer)}
        else:
            said, tensors = {"values": dict(answer.values)}, answer.tensors
        if keeps:
            assert not tensors, f"{name}: a reply to a request that changes something has no tensors"
            known.answer = said
        return [self.reply(client, number, said, tensors)]

    def reply(
        self, client: int, number: int, said: Mapping[str, Any], tensors: Sequence[torch.Tensor] = ()
    ) -> tuple[int, ServerMessage]:
        """Return a reply, with what the client must know of the disk."""
        disk = {"durable": self.durable.get(client, 0), "saved": self.has_saved, "behind": self.is_behind}
        return client, ServerMessage({"seq": number, **disk, **said}, tensors)


# What a server hosts: state of its own that requests of ranks read and change.
#
# [Note: applied once] Each request of a client has a number. One that changes something is remembered by it: a
# client that has lost its connection sends it again, and a server that knows the number answers as it did before,
# without doing it twice, also where it failed. A server that was restored from a snapshot knows the numbers of the
# snapshot, and the clients send again what came later. Requests that only read are carried out each time, so their
# replies may hold tensors; replies of the others hold none.


class Service(Protocol):
    """Runs in one thread: no call comes before the last one has returned."""

    @property
    def is_behind(self) -> bool:
        """Whether a client was told what could not be restored: a disk failed. A snapshot is due then."""

    def handle(self, client: int, request: ServerMessage) -> ServerMessage | None:
        """Do what a rank asks for; return the reply, or None to reply later by `due`.

        A client sends no other request before it has the reply, and after a lost connection may send a request
        that only reads once more: the newer one counts. A `FarandoleError` that is raised is raised at the client.
        """

    def due(self) -> Sequence[tuple[int, ServerMessage | FarandoleError]]:
        """Return replies that were deferred and are known now, each with its client; called after each request.

        An error is raised at the client.
        """

    def client_left(self, client: int) -> None:
        """A client has ended its training, or is gone and will not come back."""

    def state(self) -> ServerMessage:
        """Return all that a snapshot must have; tensors that do not change any more."""

    def load(self, state: ServerMessage) -> None:
        """Replace the state by what `state` returned in a process that is gone; called before any request."""


class MakeService(Protocol):
    """A class of services: how a server process makes one."""

    def __call__(self, config: Mapping[str, Any]) -> Service:
        """`config`: JSON values, as they were given to `start.start_server`."""
