"""The connections of a server process: who calls, what is asked, when a snapshot is due, when the server ends.

It ends when all clients have left: by a word of theirs, or because their connection is lost and they do not come
back. So no server outlives its ranks, however these end, and it outlives each of them.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

from ...core.framing import FrameError
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
    write_text,
)
from .host import ServiceHost

HELLO_SECONDS = 5.0
"""For a caller to say who it is."""
_MOST_STRANGERS = 64
_TICK_SECONDS = 0.1
_RETRY_SECONDS = 5.0
"""After a snapshot that could not be written, where none is due by the clock."""
CONTROL = ""
"""The name in requests to the server itself, and no service."""


@dataclass(eq=False)
class _Stranger:
    socket: socket.socket
    question: bytes
    until_seconds: float
    heard: bytearray = field(default_factory=bytearray)


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
        self._host, self._listener, self._key = host, listener, key
        self._generation, self._limits, self._writer = generation, limits, writer
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._strangers: dict[int, _Stranger] = {}
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
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.data, _Stranger):
                    self._hear(key.data)
                else:
                    self._serve(key.data, events)
            self._tick(time.monotonic())
        with suppress(OSError):  # no one needs it any more
            self._writer.ended(wait=True)
        self._last_words()
        clean_up()
        for channel in self._channels.values():
            channel.close()
        self._selector.close()

    # -- callers -------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it hung up before we answered
            return
        if len(self._strangers) >= _MOST_STRANGERS:
            self._hang_up(min(self._strangers.values(), key=lambda each: each.until_seconds))
        connection.setblocking(False)
        stranger = _Stranger(connection, secrets.token_bytes(QUESTION_BYTES), time.monotonic() + HELLO_SECONDS)
        try:
            connection.send(stranger.question)  # a fresh connection takes so much at once
        except OSError:
            connection.close()
            return
        self._strangers[connection.fileno()] = stranger
        self._selector.register(connection, selectors.EVENT_READ, stranger)

    def _hear(self, stranger: _Stranger) -> None:
        try:
            data = stranger.socket.recv(HELLO.size - len(stranger.heard))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        stranger.heard += data
        if not data:
            self._hang_up(stranger)
        elif len(stranger.heard) == HELLO.size:
            hello = Hello.read(self._key, stranger.question, bytes(stranger.heard))
            if hello is None:
                self._hang_up(stranger)
            else:
                self._welcome(stranger, hello)

    def _hang_up(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        stranger.socket.close()

    def _forget(self, stranger: _Stranger) -> None:
        self._selector.unregister(stranger.socket)
        del self._strangers[stranger.socket.fileno()]

    def _welcome(self, stranger: _Stranger, hello: Hello) -> None:
        self._forget(stranger)
        key_in, key_out = hello.keys(self._key, stranger.question)
        stranger.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel = ServerChannel(stranger.socket, key_out, key_in, self._limits.most_bytes)
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
        for stranger in [each for each in self._strangers.values() if each.until_seconds < now]:
            self._hang_up(stranger)
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
