"""Connections between ranks of a group that are made when the first message needs them.

Each rank listens, and has said where in the store when the group was made. Who has something to send to a rank, or
waits for it, calls it; what is sent travels by the sender's own call. So ranks need not agree on when.

[Note: a rank that has left] A rank that waits for another one has called it, and notices by its own call when that
one ends. What that one had sent before may still be on its way then: it travels by the other call, and is over
when that one has ended too.
"""

from __future__ import annotations

import secrets
import socket
import time
from hmac import compare_digest

from ...core.environ.env import SECRET, read_job_secret
from ...core.vocabulary.errors import CommError
from ..transport.connect import HELLO, Callers, Connection, Door, call_rank
from ..transport.group_messages import FrameTransport
from ..world.host_address import own_address
from ..world.store_sync import all_gather_json, require_equal
from ..world.world import World

_TOPIC = "listening for messages"


class LateConnections:
    """The connections of one group, and the transport that uses them. Made by all its ranks at once."""

    def __init__(self, world: World, names: tuple[int, ...]) -> None:
        """`names`: the group's global ranks, for errors."""
        self._world = world
        address = own_address(world.address)
        self._listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._listener.bind((address, 0))
            self._listener.listen(max(16, world.size))
            secret = read_job_secret()
            self._door = Door(secret, secrets.token_hex(16))
            mine = {"address": address, "port": self._listener.getsockname()[1], "question": self._door.question}
            mine |= {"host": world.host, "fingerprint": Door.fingerprint(secret)}
            self._everyone = all_gather_json(world, _TOPIC, mine)
            prints = [said["fingerprint"] for said in self._everyone]
            remedy = f"give all ranks the same {SECRET}, or none"
            require_equal(world, _TOPIC, "the fingerprint of the job's secret", prints, remedy=remedy)
            nobody: list[list[socket.socket]] = [[] for _ in range(world.size)]
            self.transport = FrameTransport(world, timeout_seconds=world.timeout_seconds, made=nobody, names=names)
        except BaseException:
            self._listener.close()
            raise
        self._callers = Callers(self._listener, HELLO.size)
        self.transport.watch(self._callers.descriptor, self._answer)
        self._is_deaf = False
        self._called: dict[int, Connection] = {}
        """By the rank that I have called."""
        self._refused: dict[int, str] = {}
        """Why there is no connection to a rank that was called."""
        self._calls_of: dict[int, Connection] = {}
        """By the rank that has called me."""

    def call(self, rank: int, seconds: float, *, to_send: bool) -> None:
        """Have a connection to `rank`. Without one, raises `PeerLost` when it is needed to send.

        Who wants to receive may find in what has come already what a rank sent before it left.
        """
        if rank in self._called or (rank in self._refused and not to_send):
            return
        try:
            deadline = time.monotonic() + seconds
            connection = call_rank(self._world, rank, self._everyone[rank], 0, deadline)
        except CommError as problem:
            self._refused[rank] = str(problem)
            if to_send:
                raise self.transport.peers.gone({rank: str(problem)}) from None
            return
        _tune(connection)
        self._called[rank] = self.transport.add(rank, connection, sends=True)

    def has_lost(self, rank: int) -> bool:
        """Return whether nothing sent to `rank` arrives any more."""
        return rank in self._called and bool(self._called[rank].lost)

    def refuse_silent(self, ranks: set[int]) -> None:
        """Raise `PeerLost` when one of `ranks` is gone and all that it had sent is here.

        See [Note: a rank that has left].
        """
        if any(self.has_lost(rank) or rank in self._refused for rank in ranks):
            self._answer()
        lost = {}
        for rank in ranks:
            theirs = self._calls_of.get(rank)
            reason = self._called[rank].lost if rank in self._called else self._refused.get(rank, "")
            if theirs is not None and theirs.lost:
                lost[rank] = theirs.lost
            elif theirs is None and reason and not self._callers.has_pending:
                lost[rank] = reason
        if lost:
            raise self.transport.peers.gone(lost)

    def close(self) -> None:
        """Close all of it."""
        self.stop_listening()
        self.transport.close()

    def stop_listening(self) -> None:
        """Refuse ranks that have not called yet. May be called twice."""
        if not self._is_deaf:
            self._is_deaf = True
            self.transport.unwatch(self._callers.descriptor)
            self._callers.close()
            self._listener.close()

    def _answer(self) -> None:
        if self._is_deaf:
            return
        for hello, connection in self._callers.hear(0.0):
            told, rank, lane = HELLO.unpack(hello)
            is_new = rank < self._world.size and rank not in (self._world.rank, *self._calls_of)
            if not is_new or lane or not compare_digest(told, self._door.hello(rank, lane)):
                connection.close()
                continue
            _tune(connection)
            self._calls_of[rank] = self.transport.add(rank, connection, sends=False)


def _tune(connection: socket.socket) -> None:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
