"""What a server hosts: state of its own that requests of ranks read and change.

[Note: applied once] Each request of a client has a number. One that changes something is remembered by it: a
client that has lost its connection sends it again, and a server that knows the number answers as it did before,
without doing it twice, also where it failed. A server that was restored from a snapshot knows the numbers of the
snapshot, and the clients send again what came later. Requests that only read are carried out each time, so their
replies may hold tensors; replies of the others hold none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ...core.vocabulary.errors import FarandoleError
from .channel import ServerMessage


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
