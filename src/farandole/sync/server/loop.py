"""The connections of a server process: who calls, what is asked, when a snapshot is due, when the server ends.

It ends when all clients have left: by a word of theirs, or because their connection is lost and they do not come
back. So no server outlives its ranks, however these end, and it outlives each of them.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from ...comm.transport.connect import Callers, HeardCall
from ...core.framing import FrameError
from ...core.vocabulary.errors import FarandoleError
from .channel import (
    HELLO,
    LENGTH,
    MOST_TEXT_BYTES,
    QUESTION_BYTES,
    Hello,
    Outline,
    ServerChannel,
    ServerMessage,
    tensor_views,
    write_problem,
    write_text,
)

_MOST_CALLERS = 64
"""That have not said who they are."""
_TICK_SECONDS = 0.1
_RETRY_SECONDS = 5.0
"""After a snapshot that could not be written, where none is due by the clock."""
CONTROL = ""
"""The name in requests to the server itself, and no service."""


@dataclass(frozen=True)
class Limits:
    """Times and sizes of one server."""

    snapshot_seconds: float
    """Between two snapshots; 0: only those that clients ask for."""
    grace_seconds: float
    """For a client that has lost its connection to come back."""
    start_seconds: float
    """For clients to call at all."""
    most_bytes: int
    """Tensors of a request."""
    starter: int = 0
    """The process that must live until a client has called; 0: none must."""


class ServerLoop:
    """Serves the clients of `host` on a listener until all have left."""

    def __init__(
        self, host: ServiceHost, listener: socket.socket, *, key: bytes, generation: int, limits: Limits,
        writer: SnapshotWriter,
    ) -> None:  # fmt: skip
        self._host, self._key = host, key
        self._generation, self._limits, self._writer = generation, limits, writer
        self._selector = selectors.DefaultSelector()
        self._callers = Callers(listener, HELLO.size, question_bytes=QUESTION_BYTES, most=_MOST_CALLERS)
        self._selector.register(self._callers, selectors.EVENT_READ)
        self._channels: dict[int, ServerChannel] = {}
        """By client."""
        now = time.monotonic()
        self._missing = dict.fromkeys(host.expected, now + limits.start_seconds)
        """Clients without a connection, and until when they may come back."""
        self._was_called = False
        """Whether a client has called."""
        self._saved_changes, self._saved_at = host.changes, now
        self._wants_snapshot: list[tuple[int, int, int]] = []
        """Who asked for a snapshot: client, number of the request, changes that it must have."""
        self._alarm: str | None = None
        """Why snapshots cannot be written; empty once a client was told; None: they can."""

    def has_callers(self) -> bool:
        """Return whether a client is connected. May be called by any thread."""
        return bool(self._channels)

    def run(self, clean_up: Callable[[], None]) -> None:
        """Serve, and `clean_up` before the last client sees the end."""
        while self._host.expected:
            for key, events in self._selector.select(_TICK_SECONDS):
                if key.fileobj is not self._callers:
                    self._serve(key.data, events)
            self._hear()  # also lets those go that say nothing
            self._tick(time.monotonic())
        with suppress(OSError):  # no one needs it any more
            self._writer.ended(wait=True)
        self._last_words()
        clean_up()
        for channel in self._channels.values():
            channel.close()
        self._callers.close()
        self._selector.close()

    # -- callers -------------------------------------------------------------------------------

    def _hear(self) -> None:
        calls: Sequence[HeardCall] = ()
        with suppress(OSError):  # too many files are open, say: the next time
            calls = self._callers.hear(0.0)
        for call in calls:
            hello = Hello.read(self._key, call.question, call.hello)
            if hello is None:
                call.connection.close()
            else:
                self._welcome(call, hello)

    def _welcome(self, call: HeardCall, hello: Hello) -> None:
        key_in, key_out = hello.keys(self._key, call.question)
        call.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel = ServerChannel(call.connection, key_out, key_in, self._limits.most_bytes)
        client, refused = hello.client, ""
        if hello.generation != self._generation:
            refused = f"it is of generation {hello.generation} of the ranks, and the server of {self._generation}"
        elif client not in self._host.expected:
            refused = "the server has given it up: it was away for too long, or is no client of this server"
        if refused:
            channel.queue(ServerMessage({"refused": refused}))
            channel.send_what_fits()
            channel.close()
            return
        if client in self._channels:  # its old connection is lost, and we have not seen it yet
            self._drop(client)
        self._was_called = True
        self._channels[client] = channel
        self._missing.pop(client, None)
        self._selector.register(channel.socket, selectors.EVENT_READ, client)
        self._send([(client, ServerMessage({"last": self._host.last_of(client), "process": os.getpid()}))])

    # -- clients -------------------------------------------------------------------------------

    def _serve(self, client: int, events: int) -> None:
        channel = self._channels.get(client)
        if channel is None:
            return  # dropped in this very batch of events
        try:
            if events & selectors.EVENT_WRITE:
                channel.send_what_fits()
                self._watch(client, channel)
            requests = channel.receive() if events & selectors.EVENT_READ else []
        except (OSError, FrameError):
            self._drop(client)
            return
        try:
            for request in requests:
                self._take(client, request)  # an OSError here is of a service, and ends the server
        except FrameError:
            if self._channels.get(client) is channel:
                self._drop(client)

    def _take(self, client: int, request: ServerMessage) -> None:
        if request.values.get("service") != CONTROL:
            self._send(self._host.take(client, request))
            if request.values.get("saves") and not self._writer.is_busy and not self._wants_snapshot:
                self._wants_snapshot.append((client, -1, self._host.changes))
            return
        number, values = int(request.values["seq"]), request.values["values"]
        if values.get("do") == "leave":
            is_last = self._host.expected == {client}
            self._send([self._host.reply(client, number, {"values": {"last": is_last}})])
            self._send(self._host.leave(client))
        elif values.get("do") == "snapshot":
            self._wants_snapshot.append((client, number, self._host.changes))
        else:
            raise FrameError(f"a request to the server that it does not know: {values!r:.200}")

    def _send(self, replies: Iterable[tuple[int, ServerMessage]]) -> None:
        for client, reply in replies:
            channel = self._channels.get(client)
            if channel is None:
                continue  # it asks again when it is back
            channel.queue(reply)
            try:
                channel.send_what_fits()
                self._watch(client, channel)
            except OSError:
                self._drop(client)

    def _watch(self, client: int, channel: ServerChannel) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.has_more_to_send else 0)
        if self._selector.get_key(channel.socket).events != wanted:
            self._selector.modify(channel.socket, wanted, client)

    def _drop(self, client: int) -> None:
        channel = self._channels.pop(client)
        self._selector.unregister(channel.socket)
        channel.close()
        if client in self._host.expected:
            self._missing[client] = time.monotonic() + self._limits.grace_seconds

    # -- what is due ---------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        if self._limits.starter and not self._was_called and os.getppid() != self._limits.starter:
            self._host.expected.clear()  # the ranks end before they have begun
        for client in [client for client, until in self._missing.items() if until < now]:
            del self._missing[client]
            self._send(self._host.leave(client))
            # What it sent cannot be sent again.
            self._wants_snapshot.append((client, -1, self._host.changes))
        self._end_snapshot()
        changed = self._host.changes - self._saved_changes
        seconds = self._limits.snapshot_seconds
        is_time = now >= self._saved_at + (seconds or _RETRY_SECONDS)
        if self._writer.is_busy or not self._host.expected:
            return
        if self._writer.has_failed and is_time:
            self._saved_at = now
            self._writer.again()
        elif self._writer.has_failed:
            self._tell_saved(is_saved=False)
        elif self._wants_snapshot or (is_time and ((seconds and changed) or self._host.is_behind)):
            self._saved_changes, self._saved_at = self._host.changes, now
            self._writer.begin(self._host.state(), self._host.lasts())

    def _end_snapshot(self) -> None:
        """See whether one is on the disk; a disk that fails is an alarm, once, and no reason to end."""
        try:
            lasts = self._writer.ended()
        except OSError as problem:
            if self._alarm is None:
                self._alarm = problem.strerror or str(problem)
            self._tell_saved(is_saved=False)
            lasts = None
        if lasts is not None:
            self._alarm = None
            self._host.durable, self._host.has_saved = lasts, True
            self._tell_saved(is_saved=True)
        client = min(self._host.expected, default=-1)
        if self._alarm and client in self._channels:
            alarm, self._alarm = self._alarm, ""
            self._send([(client, ServerMessage({"alarm": alarm}))])

    def _tell_saved(self, *, is_saved: bool) -> None:
        wants = self._wants_snapshot
        done = [each for each in wants if (each[2] <= self._saved_changes if is_saved else each[1] >= 0)]
        self._wants_snapshot = [each for each in wants if each not in done]
        for client, number, _ in done:
            if number >= 0:
                self._send([self._host.reply(client, number, {"values": {"saved": is_saved}})])

    def _last_words(self) -> None:
        """Send replies to clients that have left, for a moment."""
        until = time.monotonic() + 1.0
        while any(each.has_more_to_send for each in self._channels.values()) and time.monotonic() < until:
            for client, channel in list(self._channels.items()):
                try:
                    channel.send_what_fits()
                except OSError:
                    self._drop(client)
            time.sleep(0.01)


# Snapshots of a server on the disk of its host: written aside, then renamed, so that one is always whole.


SNAPSHOT: Final = "snapshot"
_MOST_BYTES = 1 << 50


def write_snapshot(directory: Path, messages: Sequence[ServerMessage]) -> None:
    """Write `messages` to the disk; the last snapshot stays until this one is there. Raises `OSError`."""
    aside = directory / f"{SNAPSHOT}.new"
    try:
        with aside.open("wb") as file:
            os.fchmod(file.fileno(), 0o600)
            for message in messages:
                text = write_text(message)
                file.write(LENGTH.pack(len(text)) + text)
                for view in tensor_views(message):
                    file.write(view)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(directory / SNAPSHOT)
    except OSError:
        with suppress(OSError):
            aside.unlink()  # a full disk needs the room
        raise
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_snapshot(directory: Path) -> list[ServerMessage]:
    """Return the messages of the last snapshot; empty without one. Raises `FrameError` for a damaged one."""
    try:
        file = (directory / SNAPSHOT).open("rb")
    except FileNotFoundError:
        return []
    found = []
    with file:
        while head := file.read(LENGTH.size):
            if len(head) < LENGTH.size or (length := LENGTH.unpack(head)[0]) > MOST_TEXT_BYTES:
                raise FrameError(f"{directory / SNAPSHOT} is damaged after {file.tell()} bytes")
            outline = Outline.read(file.read(length), _MOST_BYTES)
            memory = torch.empty(outline.nbytes, dtype=torch.uint8)
            if outline.nbytes and file.readinto(memory.numpy().data) != outline.nbytes:
                raise FrameError(f"{directory / SNAPSHOT} ends after {file.tell()} bytes, in a tensor")
            found.append(outline.message(memory))
    return found


class SnapshotWriter:
    """Writes snapshots in a thread of its own, one at a time. One that could not be written is kept for `again`.

    So services are asked for their next state only when the last one is on the disk (see `clock_service`).
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._thread = ThreadPoolExecutor(1, "farandole-snapshot")
        self._writing: Future[None] | None = None
        self._snapshot: tuple[Sequence[ServerMessage], dict[int, int]] | None = None
        """What is being written, or could not be."""

    @property
    def is_busy(self) -> bool:
        """Whether one is being written."""
        return self._writing is not None

    @property
    def has_failed(self) -> bool:
        """Whether the last one could not be written, and waits for `again`."""
        return self._writing is None and self._snapshot is not None

    def begin(self, messages: Sequence[ServerMessage], lasts: dict[int, int]) -> None:
        """Begin to write one. `lasts`: by client the last request that is in it."""
        assert self._snapshot is None, "one at a time"
        self._snapshot = messages, lasts
        self.again()

    def again(self) -> None:
        """Begin once more to write one that could not be written."""
        assert self._snapshot is not None, "has_failed"
        self._writing = self._thread.submit(write_snapshot, self._directory, self._snapshot[0])

    def ended(self, *, wait: bool = False) -> dict[int, int] | None:
        """Return the `lasts` of a snapshot that is on the disk now; None: none is since the last call.

        Raises `OSError` where it could not be written.
        """
        if self._writing is None or not (wait or self._writing.done()):
            return None
        writing, self._writing = self._writing, None
        writing.result()
        assert self._snapshot is not None, "it was written"
        (_, lasts), self._snapshot = self._snapshot, None
        return lasts

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True)


# The services of one server, and which requests of each client they have had. No socket, no file, no clock.


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
        """`config`: JSON values, as they were given to `client.start_server`."""
