"""A rank's end of the connection to a server: requests, replies, and what is sent again after a loss.

[Note: what is sent again] Requests that change something are kept until the server has said that they are in a
snapshot on its disk. When the connection is lost, the rank calls again, hears which of them the server knows,
and sends the later ones in their order. So a server that was restored from a snapshot gets what it had before,
and nothing twice. What is kept is bounded: at the bound the rank has the server write a snapshot, and waits for
it.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from ...core.env import inherited_environment
from ...core.framing import FrameError
from ...core.vocabulary.errors import CommError, LaunchError, PeerLost, Stalled
from ...core.vocabulary.run_files import is_held
from ...core.vocabulary.text import write_notice
from .channel import (
    QUESTION_BYTES,
    Hello,
    ServerChannel,
    ServerMessage,
    open_connection,
    read_problem,
    wait_for_any,
)
from .loop import CONTROL, Limits

RESTORE_SECONDS = 60.0
"""For a server that is gone to be there again."""
_MOST_LOSSES = 8
"""Times that a connection is lost before a reply comes: a server that dies of a request does so for ever."""
_LOOK_SECONDS = 0.1
_CALL_SECONDS = 5.0
_LEAVE_SECONDS = 20.0


class _Bounds(NamedTuple):
    kept_bytes: int
    reply_bytes: int


@dataclass
class _Server:
    """What a client knows of its server's process and disk."""

    process: int = 0
    """0: it was never called."""
    losses: int = 0
    """Times that the connection was lost since the last reply, and `deaths`."""
    deaths: int = 0
    """Times that the process died since it wrote a snapshot."""
    forgotten: int = 0
    """The last request that is in no snapshot and is kept no more."""
    is_behind: bool = False
    """Whether it has told what it could not restore."""


class ServerClient:
    """One client of one server. To be used by one thread."""

    def __init__(
        self, place: ServerPlace, key: bytes, *, client: int, rank: int, host: str, most_kept_bytes: int,
        most_bytes: int, still_on: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Call the server.

        Args:
            place: where it is.
            key: the secret of its clients.
            client: the number of this one, among `place.clients`.
            rank: what errors call this process.
            host: where this process runs: a server of the same host is restored from here.
            most_kept_bytes: of tensors of requests that are in no snapshot yet.
            most_bytes: tensors of a reply that is taken.
            still_on: raises where this process should wait no longer.

        Raises:
            CommError: it cannot be reached, or refuses this client.
        """
        self.place, self._key, self._client, self._rank = place, key, client, rank
        self._restores, self.still_on = host == place.host, still_on
        self._most = _Bounds(most_kept_bytes, most_bytes)
        self._channel: ServerChannel | None = None
        self._number = 0
        self._kept: deque[tuple[int, ServerMessage]] = deque()
        self._kept_bytes = 0
        self._asked: tuple[int, ServerMessage] | None = None
        """The request whose reply is not there."""
        self._reply: ServerMessage | None = None
        self._server = _Server()
        self.restored: list[ServerProcess] = []
        """Servers that were started anew from here."""
        self._connect()

    # -- requests ------------------------------------------------------------------------------

    def call(
        self, service: str, values: Mapping[str, Any], tensors: Sequence[torch.Tensor] = (), *, keeps: bool
    ) -> ServerMessage:
        """Send a request and wait for its reply: see `ask` and `wait_for`."""
        self.ask(service, values, tensors, keeps=keeps)
        return wait_for([self])[0]

    def ask(
        self, service: str, values: Mapping[str, Any], tensors: Sequence[torch.Tensor] = (), *, keeps: bool
    ) -> None:
        """Begin to send a request, whose reply `wait_for` returns.

        Args:
            service: its name among the services of the server.
            values: JSON values.
            tensors: in CPU memory; with `keeps` they must never change.
            keeps: whether it changes something, and is applied once whatever is lost.
        """
        if keeps and self._kept_bytes > self._most.kept_bytes:
            self.save()
        self._ask(service, values, tensors, keeps=keeps)

    def save(self) -> None:
        """Have the server write a snapshot, and wait until it is on the disk.

        Where it cannot, nothing is kept for it any more, as that would have no bound: it goes on, and its death is
        a loss.
        """
        self._ask(CONTROL, {"do": "snapshot"}, (), keeps=False)
        if not wait_for([self])[0].values["saved"] and self._kept:
            self._server.forgotten = self._kept[-1][0]
            self._kept.clear()
            self._kept_bytes = 0

    def leave(self) -> bool:
        """Say that this client has ended, and wait for the server's end if it was the last; return whether it was.

        It raises nothing.
        """
        if self._channel is None:
            return False
        self._asked, last = None, False
        try:
            self._ask(CONTROL, {"do": "leave"}, (), keeps=False)
            # A server that is gone is restored to hear it: it knows of the others, and clears its directory.
            last = bool(wait_for([self], _LEAVE_SECONDS)[0].values["last"])
            until = time.monotonic() + _CALL_SECONDS
            while last and time.monotonic() < until:
                wait_for_any([self.connection], _LOOK_SECONDS)
                self.connection.receive()  # raises at its end
        except (OSError, FrameError, CommError):
            pass
        self.close()
        return last

    def close(self) -> None:
        """Close the connection without a word: the server gives this client up after a while."""
        channel, self._channel = self._channel, None
        self._asked = None
        self._kept.clear()
        if channel is not None:
            channel.close()

    # -- what `wait_for` needs -------------------------------------------------------------------

    @property
    def is_answered(self) -> bool:
        """Whether the reply to the last request is there."""
        return self._reply is not None

    @property
    def connection(self) -> ServerChannel:
        """The connection; raises `CommError` after `close`."""
        if self._channel is None:
            raise CommError("the connection is closed", rank=self._rank, operation=self._operation)
        return self._channel

    def move(self) -> None:
        """Send and receive what can be without waiting; call again where the connection is lost."""
        channel = self.connection
        try:
            channel.send_what_fits()
            for reply in channel.receive():
                self._take(reply)
        except (OSError, FrameError):
            if self._reply is not None:  # the next request finds it out
                return
            channel.close()
            self._channel = None
            self._count_loss()
            self._connect()

    def take_reply(self) -> ServerMessage:
        """Return the reply, once; raise the error that it is."""
        reply, self._reply = self._reply, None
        assert reply is not None, "is_answered"
        error = reply.values.get("error")
        if error is not None:
            raise read_problem(error, rank=self._rank, operation=self._operation)
        return reply

    @property
    def _operation(self) -> str:
        return f"server {self.place.number} on {self.place.host}"

    # -- requests and replies --------------------------------------------------------------------

    def _ask(
        self, service: str, values: Mapping[str, Any], tensors: Sequence[torch.Tensor], *, keeps: bool
    ) -> None:
        self._number += 1
        is_filling = 2 * self._kept_bytes > self._most.kept_bytes
        named = {"seq": self._number, "service": service, "keeps": keeps, "values": values, "saves": is_filling}
        request = ServerMessage(named, tensors)
        if keeps:
            self._kept.append((self._number, request))
            self._kept_bytes += request.nbytes
        self._asked, self._reply = (self._number, request), None
        self.connection.queue(request)

    def _take(self, reply: ServerMessage) -> None:
        if "alarm" in reply.values:
            write_notice(
                f"ALARM: {self._operation}: no snapshot could be written into {self.place.directory}: "
                f"{reply.values['alarm']}; it goes on, and tries again"
            )
            return
        durable = int(reply.values["durable"])
        self._server.is_behind = bool(reply.values["behind"])
        self._server.deaths = 0 if reply.values["saved"] else self._server.deaths
        while self._kept and self._kept[0][0] <= durable:
            self._kept_bytes -= self._kept.popleft()[1].nbytes
        if self._asked is None or reply.values.get("seq") != self._asked[0]:
            return  # to a request that was sent again, and was answered before
        self._asked, self._server.losses = None, self._server.deaths
        self._reply = reply if "error" in reply.values else ServerMessage(reply.values["values"], reply.tensors)

    # -- connections: see [Note: what is sent again] ---------------------------------------------

    def _connect(self) -> None:
        until, problem = time.monotonic() + RESTORE_SECONDS, ""
        while True:
            self.still_on()
            try:
                self._channel, last, process = self._call()
                break
            except (OSError, FrameError) as found:
                problem = str(found) or type(found).__name__
            if time.monotonic() > until:
                raise PeerLost(
                    f"cannot be reached at {self.place.address}:{self.place.port} for {RESTORE_SECONDS:g} s: "
                    f"{problem}",
                    rank=self._rank,
                    operation=self._operation,
                    remedy="go on from the last checkpoint; a server is restored by ranks on its host alone",
                )
            self._restore()
            time.sleep(_LOOK_SECONDS)
        is_another, self._server.process = self._server.process not in (0, process), process
        self._server.deaths += is_another
        if last < self._server.forgotten or (is_another and self._server.is_behind):
            raise PeerLost(
                "it died, and its last snapshot is too old to go on from: the disk took no later one",
                rank=self._rank,
                operation=self._operation,
                remedy=f"look at the disk of {self.place.host}, and go on from the last checkpoint",
            )
        for number, request in self._kept:
            if number > last and (self._asked is None or number != self._asked[0]):
                self._channel.queue(request)
        if self._asked is not None:
            self._channel.queue(self._asked[1])

    def _count_loss(self) -> None:
        self._server.losses += 1
        if self._server.losses > _MOST_LOSSES:
            said = last_words(self.place) if self._restores else ""
            raise PeerLost(
                f"its connection was lost {self._server.losses} times before it replied or wrote a snapshot; its "
                f"last words: {said!r}",
                rank=self._rank,
                operation=self._operation,
                remedy=f"look at the disk and the memory of {self.place.host}, and go on from the last checkpoint",
            )

    def _restore(self) -> None:
        if not self._restores:
            return
        try:
            process = restore_server(self.place, self._key)
        except LaunchError as problem:
            raise PeerLost(
                f"it is gone and cannot be restored: {problem.message}",
                rank=self._rank,
                operation=self._operation,
                remedy="go on from the last checkpoint",
            ) from None
        if process is not None:
            self.restored.append(process)

    def _call(self) -> tuple[ServerChannel, int, int]:
        """Return a connection, the last request that the server knows, and its process. Raises `OSError`."""
        connection = open_connection(self.place.address, self.place.port, _CALL_SECONDS)
        try:
            asked = bytearray()
            while len(asked) < QUESTION_BYTES:
                part = connection.recv(QUESTION_BYTES - len(asked))
                if not part:
                    raise ConnectionResetError("it closed its connection")
                asked += part
            hello = Hello.make(self._client, self.place.generation)
            connection.sendall(hello.pack(self._key, bytes(asked)))
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            key_out, key_in = hello.keys(self._key, bytes(asked))
            channel = ServerChannel(connection, key_out, key_in, self._most.reply_bytes)
            until, said = time.monotonic() + _CALL_SECONDS, list[ServerMessage]()
            while not said:
                if time.monotonic() > until:
                    raise TimeoutError("it does not answer")
                wait_for_any([channel], _LOOK_SECONDS)
                said = channel.receive()
        except BaseException:
            connection.close()
            raise
        if "refused" in said[0].values:
            connection.close()
            raise PeerLost(
                f"it refuses this rank: {said[0].values['refused']}",
                rank=self._rank,
                operation=self._operation,
                remedy="this rank cannot go on: start it anew with the next generation, from a checkpoint",
            )
        return channel, int(said[0].values["last"]), int(said[0].values["process"])


def wait_for(
    clients: Sequence[ServerClient],
    timeout_seconds: float = float("inf"),
    *,
    beside: Sequence[ServerClient] = (),
) -> list[ServerMessage]:
    """Return the replies to the last request of each of `clients`, in their order.

    `beside`: connections that are looked after meanwhile: a server that was restored may need what this rank kept
    for it before others can reply.

    Raises the error that a reply is, `Stalled` after `timeout_seconds`, and `CommError` for a server that is gone.
    """
    until = time.monotonic() + timeout_seconds
    while waiting := [each for each in clients if not each.is_answered]:
        for each in (*waiting, *beside):
            each.move()
        waiting = [each for each in waiting if not each.is_answered]
        if not waiting:
            break
        waiting[0].still_on()
        if time.monotonic() > until:
            raise Stalled(
                f"no reply within {timeout_seconds:g} s",
                rank=waiting[0]._rank,
                operation=waiting[0]._operation,
                remedy="another rank is stuck: the reply waits for its step",
            )
        wait_for_any([each.connection for each in (*waiting, *beside)], _LOOK_SECONDS)
    return [each.take_reply() for each in clients]


# Starting a server process on this host, and restoring one that is gone from its snapshot.
#
# [Note: who restores] A server lies in a directory of its host. Any rank of that host that finds it gone takes the
# lock there, looks once more, and starts it anew at its old address: ranks on other hosts call there and need not
# be told. The kernel gives the lock back if the rank that holds it dies. When the server has ended on purpose its
# directory is gone too.


_LOCK, _LOG = "lock", "log"
_ROOT = Path(__file__).resolve().parents[3]
_START: Final = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
if sys.argv[2:]:
    from farandole.core.vocabulary.run_files import end_with_job
    end_with_job(pathlib.Path(sys.argv[2]))
from farandole.sync.server.main import main
sys.exit(main())
"""
_SHOWN_LINES = 3
START_SECONDS = 120.0
"""For a server to listen: it imports torch first."""


@dataclass(frozen=True)
class ServerPlace:
    """Where a server is, and what it hosts. All ranks know it."""

    number: int
    host: str
    address: str
    directory: str
    clients: Sequence[int]
    """Those that it lives for."""
    services: Mapping[str, Mapping[str, Any]]
    """By name: ``class``, as ``module:class`` of a `MakeService`, and its ``config`` of JSON values."""
    limits: Limits
    generation: int = 0
    port: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ServerPlace:
        """Return what `to_json` returned."""
        return cls(**{**values, "limits": Limits(**values["limits"])})


def make_directory(parent: str | None) -> str:
    """Return a fresh directory that only this user can enter, in `parent` or where temporary files are."""
    return tempfile.mkdtemp(prefix="farandole-server-", dir=parent)


def start_server(place: ServerPlace, key: bytes, *, restores: bool = False) -> tuple[ServerPlace, ServerProcess]:
    """Start a server of `place`, at its port if it has one; return where it is, and the process.

    It is in a session of its own, and outlives this process while other clients are there, but not the launcher.
    Raises `LaunchError` with what it said.
    """
    directory = Path(place.directory)
    is_of_run = directory.parent != Path(tempfile.gettempdir())
    job = [str(directory)] if is_of_run and is_held(directory.parent) else []
    with (directory / _LOG).open("w") as log:
        process = ServerProcess(
            [sys.executable, "-c", _START, str(_ROOT), *job],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
            env=inherited_environment({"OMP_NUM_THREADS": "1"}),
        )  # fmt: skip
    assert process.stdin is not None, "a pipe"
    assert process.stdout is not None, "a pipe"
    config = {**place.to_json(), "key": key.hex(), "restores": restores, "starter": os.getpid()}
    with suppress(BrokenPipeError), process.stdin:
        process.stdin.write(json.dumps(config) + "\n")
    with process.stdout:
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        is_late = not poll.poll(1e3 * START_SECONDS)
        said = "" if is_late else process.stdout.readline()
    if not said:
        process.kill()
        process.wait()
        why = last_words(place) or (f"it said nothing for {START_SECONDS:g} s" if is_late else "it was killed")
        if not restores:
            shutil.rmtree(directory, ignore_errors=True)
        raise LaunchError(
            f"server {place.number} on {place.host} did not start: {why}",
            remedy=f"see that Python starts there, and that {directory.parent} can be written to",
        )
    return replace(place, port=int(json.loads(said)["port"])), process


def last_words(place: ServerPlace) -> str:
    """Return the end of what a server of this host has written to its standard error."""
    try:
        lines = (Path(place.directory) / _LOG).read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return " | ".join(lines[-_SHOWN_LINES:])


class ServerProcess(subprocess.Popen[str]):
    """A server that this process has started, and may leave running."""

    def __del__(self, *_: Any) -> None:
        """Say nothing of a server that runs on for other ranks."""

    def end(self, seconds: float) -> bool:
        """Wait for its end; return whether it has come."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(seconds)
        return self.returncode is not None


def restore_server(place: ServerPlace, key: bytes) -> ServerProcess | None:
    """Start a server anew that is gone; None: another rank does, or it runs. See [Note: who restores].

    Raises `LaunchError` where it cannot be started, or has ended on purpose.
    """
    directory = Path(place.directory)
    try:
        lock = (directory / _LOCK).open("w")
    except FileNotFoundError:
        raise LaunchError(f"server {place.number} on {place.host} has ended, and {directory} is gone") from None
    except OSError as problem:
        raise LaunchError(f"server {place.number} on {place.host} has ended: {problem}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        if _answers(place):
            return None
        _, process = start_server(place, key, restores=True)
        return process


def _answers(place: ServerPlace) -> bool:
    with suppress(OSError), open_connection(place.address, place.port, 1.0):
        return True
    return False
