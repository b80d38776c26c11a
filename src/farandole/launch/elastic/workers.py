"""The workers of one machine: their processes and their control channels.

The launcher has them for this machine, and the agent of each other host.
"""

from __future__ import annotations

import selectors
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...core import env
from ...core.framing import FrameError, StreamSigner, StreamVerifier
from ...core.rank_variables import RANK_NAMES
from ...core.vocabulary.errors import FarandoleError
from ..job.contract import JobSpec, RankSpec, rank_environment
from ..supervise.failure import Exit
from ..supervise.job_loop import HostReports, JobHost, Reports
from ..supervise.process import RankProcess, Reaper, start_rank
from ..supervise.ranks import HostRanks
from .control import (
    HELLO_BYTES,
    Frame,
    frame_signer,
    frame_verifier,
    make_nonce,
    make_secret,
    read_hello,
    session_keys,
    sign,
    verify,
    worker_key,
)

ALIVE_SECONDS = 5.0
"""How often a worker that waits hears from us."""
HUNG_UP_SECONDS = 30.0
"""Time for a worker to end after its channel closed: it can no longer be told to leave."""


Place = Callable[[str], RankSpec]
"""Returns host, interface and cores of workers on a host of this name; they get their rank later.

Raises `FarandoleError` for a host that cannot be reached.
"""


class Workers(HostRanks):
    """The `WorkerHost` of all that is started here: workers are started one by one, each with a key of its own.

    What is a rank in `HostRanks` is a worker's number here.
    """

    def __init__(
        self, command: Sequence[str], job: JobSpec, environment: Mapping[str, str], reaper: Reaper, *,
        reports: Reports, place: Place,
    ) -> None:  # fmt: skip
        """The control channels are listened for at the job's address."""
        super().__init__(command, job, environment, reports, reaper)
        self._place = place
        self.is_open = True
        self._secret = make_secret()
        self._switchboard = Switchboard(job.address, self._secret, self._selector)
        self._next_alive = 0.0
        self._hung_up: dict[int, float] = {}
        """When the channel of a worker was lost; it ends by itself, as a rule."""

    def poll(self) -> None:
        """Deal with what has come."""
        for key, _ in self._selector.select(0):
            data: Any = key.data
            if isinstance(data, Switchboard):
                data.accept(time.monotonic())
            elif isinstance(data, WorkerChannel):
                self._listen(data)
            else:
                self._rank_event(key)

    def tick(self, now: float) -> None:
        """Do what is due."""
        super().tick(now)
        self._switchboard.tick(now)
        for worker, since in list(self._hung_up.items()):
            if now - since > HUNG_UP_SECONDS and worker in self._running:
                del self._hung_up[worker]
                self.reports.say(f"worker {worker} cannot be reached any more and is stopped")
                self.kill(worker)
        if now >= self._next_alive:
            self._next_alive = now + ALIVE_SECONDS
            for worker in self._switchboard.channels:
                self._switchboard.send(worker, {"type": "alive"})

    def start(self, worker: int, host_name: str, variables: Mapping[str, str]) -> None:
        """Start a worker; one whose host or command does not exist has ended. `variables` are for it alone."""
        try:
            self._follow(self._start_worker(worker, self._place(host_name), variables))
        except FarandoleError as problem:
            self.reports.ended(Exit(worker, problem.exit_code, time.monotonic(), held=str(problem)))

    def _start_worker(self, worker: int, place: RankSpec, variables: Mapping[str, str]) -> RankProcess:
        values = {**self.environment, **rank_environment(place, self.job, self.environment)}
        environment = {
            **{name: value for name, value in values.items() if name not in RANK_NAMES},
            **variables,
            env.RUN_DIRECTORY: str(self.job.run_directory),
            env.ELASTIC: f"{self._switchboard.address}:{self._switchboard.port}",
            env.ELASTIC_WORKER: str(worker),
            env.ELASTIC_KEY: worker_key(self._secret, worker).hex(),
        }
        return start_rank(worker, self.command, environment, place.cores, place.host)

    def tell(self, worker: int, frame: Frame) -> None:
        """Send a frame to a worker, if it has called."""
        self._switchboard.send(worker, frame)

    def kill(self, worker: int) -> None:
        """End a worker and all that it has started."""
        if worker in self._running:
            self._running[worker].signal(signal.SIGKILL)

    def close(self) -> None:
        """Kill what runs, and listen no more. May be called twice."""
        if self.is_open:
            self.is_open = False
            self._switchboard.close()
            super().close()

    def _listen(self, channel: WorkerChannel) -> None:
        for frame in self._switchboard.read(channel, self._running.__contains__):
            assert channel.worker is not None, "frames come after the hello"
            self.reports.heard(channel.worker, frame)
        if channel.worker is not None and channel.worker not in self._switchboard.channels:
            self._hung_up.setdefault(channel.worker, time.monotonic())

    def _is_frozen(self, rank: int) -> None:
        self.kill(rank)  # the others go on without it

    def _ended(self, process: RankProcess) -> None:
        self._hung_up.pop(process.rank, None)
        if process.rank in self._switchboard.channels:
            self._switchboard.hang_up(self._switchboard.channels[process.rank])
        super()._ended(process)


# The launcher's end of the control channels: a listener, and a connection for each worker that called.


HELLO_SECONDS = 5.0
"""For a caller to say who it is."""
_MOST_STRANGERS = 64
_MOST_UNSENT_BYTES = 1 << 20


@dataclass(eq=False)
class WorkerChannel:
    """One connection. Nameless until its hello has been read."""

    socket: socket.socket
    nonce: bytes
    since: float
    worker: int | None = None
    _hello: bytearray = field(default_factory=bytearray)
    _signer: StreamSigner | None = None
    _verifier: StreamVerifier | None = None
    _unsent: bytearray = field(default_factory=bytearray)

    def send(self, frame: Frame) -> None:
        """Queue a frame and send what the kernel takes; the rest goes with later calls of `flush`."""
        if self._signer is None:
            return
        self._unsent += sign(self._signer, frame)
        self.flush()

    def flush(self) -> None:
        """Send what is queued. Ignores a peer that is gone: the reading side detects it."""
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            if len(self._unsent) > _MOST_UNSENT_BYTES:
                self._unsent.clear()
                self.socket.shutdown(socket.SHUT_RDWR)  # it does not read: the next look finds the end
        except OSError:
            self._unsent.clear()

    def receive(self, secret: bytes) -> list[Frame] | None:
        """Return the frames that came; None at the end. Raises `FrameError`."""
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        if self._verifier is None:
            missing = HELLO_BYTES - len(self._hello)
            self._hello += data[:missing]
            data = data[missing:]
            if len(self._hello) < HELLO_BYTES:
                return []
            self.worker, theirs = read_hello(secret, bytes(self._hello), self.nonce)
            up, down = session_keys(worker_key(secret, self.worker), self.nonce, theirs)
            self._verifier, self._signer = frame_verifier(up), frame_signer(down)
            self.send({"type": "welcome"})
        return verify(self._verifier, data)


class Switchboard:
    """Accepts connections and passes on frames, inside the selector loop of its caller."""

    def __init__(self, address: str, secret: bytes, selector: selectors.BaseSelector) -> None:
        self.secret = secret
        self._selector = selector
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=128)
        self._listener.setblocking(False)
        self.address, self.port = address, int(self._listener.getsockname()[1])
        self.channels: dict[int, WorkerChannel] = {}
        """By worker."""
        self._strangers: set[WorkerChannel] = set()
        selector.register(self._listener, selectors.EVENT_READ, self)

    def accept(self, now: float) -> None:
        """Take a call."""
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self._strangers) >= _MOST_STRANGERS:
            connection.close()
            return
        channel = WorkerChannel(connection, make_nonce(), now)
        try:
            connection.send(channel.nonce)
        except OSError:
            connection.close()
            return
        self._strangers.add(channel)
        self._selector.register(connection, selectors.EVENT_READ, channel)

    def read(self, channel: WorkerChannel, known: Callable[[int], bool]) -> list[Frame]:
        """Return what came on a channel; hang up at its end, on bad frames and on those not `known`."""
        try:
            frames = channel.receive(self.secret)
        except FrameError:
            frames = None
        if channel in self._strangers and channel.worker is not None:
            # Each worker connects once, so a second connection is not from it.
            if not known(channel.worker) or channel.worker in self.channels:
                channel.worker, frames = None, None
            else:
                self._strangers.discard(channel)
                self.channels[channel.worker] = channel
        if frames is None:
            self.hang_up(channel)
            return []
        return frames

    def send(self, worker: int, frame: Frame) -> None:
        """Send to a worker, if it has called."""
        if worker in self.channels:
            self.channels[worker].send(frame)

    def tick(self, now: float) -> None:
        """Send what waits; hang up on strangers that said nothing for long."""
        for channel in list(self.channels.values()):
            channel.flush()
        for channel in [each for each in self._strangers if now - each.since > HELLO_SECONDS]:
            self.hang_up(channel)

    def hang_up(self, channel: WorkerChannel) -> None:
        """Close a connection."""
        self._strangers.discard(channel)
        if channel.worker is not None and self.channels.get(channel.worker) is channel:
            del self.channels[channel.worker]
        if channel.socket in self._selector.get_map():
            self._selector.unregister(channel.socket)
        channel.socket.close()

    def close(self) -> None:
        """Close everything."""
        for channel in [*self._strangers, *self.channels.values()]:
            self.hang_up(channel)
        if self._listener in self._selector.get_map():
            self._selector.unregister(self._listener)
        self._listener.close()


# What a host is to an elastic job.


class WorkerHost(JobHost, Protocol):
    """One host, or several that are reached as one: it starts workers, and passes frames on."""

    def start(self, worker: int, host_name: str, variables: Mapping[str, str]) -> None:
        """Start a worker, at once or as soon as the host can; `variables` are for it alone."""

    def tell(self, worker: int, frame: Frame) -> None:
        """Send a frame to a worker."""

    def kill(self, worker: int) -> None:
        """End a worker and all that it has started."""


class HostPool(Protocol):
    """Finds hosts by their names."""

    def hosts_are(self, names: Collection[str]) -> None:
        """Take the names that there are from now on."""

    def reach(self, name: str, slots: int, reports: HostReports) -> WorkerHost:
        """Return the host of a name, the same one as long as it is neither lost nor left.

        Raises `FarandoleError` for a name that cannot be reached from here.
        """

    def close(self) -> None:
        """The job is over: nothing of what hosts have in common stays."""
