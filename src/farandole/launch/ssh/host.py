"""Hosts over ssh, as the launcher has them: each a `JobHost`, for fixed ranks and for workers that come and go.

What is asked of one before it is connected waits. When it fails, it is reported as lost, whatever it was doing.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from ...core.framing import FrameError, read_json
from ...core.vocabulary.errors import LaunchError
from ..job.contract import JobSpec, RankSpec
from ..output import Output
from ..supervise.failure import Exit, HostFailure
from ..supervise.job_loop import FixedJob, HostReports
from ..supervise.stopped_process import OwnPauses
from .agent import FileTaker
from .frames import FILE, MESSAGE, OUTPUT, Message, read_output
from .host_failure import Handshake, check_ready, nonsense, why_hung_up, why_silent
from .host_link import HostLink
from .protocol import SUSPECT_SECONDS, Heartbeat, pack_job, pack_places, unpack_crash
from .remote_shell import HostSetup

FindPeers = Callable[["RemoteHost"], Sequence[str] | None]
"""Returns addresses of other hosts, "" for the launcher's; None: they are not known yet."""


@dataclass(frozen=True)
class RemoteJobSpec:
    """What every host is asked to run: a command, and what it gets."""

    command: Sequence[str]
    job: JobSpec
    """Its address and port are found while the job starts."""
    setup: HostSetup
    environment: Mapping[str, str]
    """What every rank gets beside its host's own environment."""
    bind: bool = True

    def start_message(self, job: JobSpec, places: Sequence[RankSpec], slots: int) -> Message:
        """Return what has a host start `places`, or wait for workers; `job` is ours with what was found meanwhile.

        Raises `LaunchError` when the plan is gone.
        """
        return {
            "type": "start", "command": list(self.command), "job": pack_job(job), "bind": self.bind,
            "environment": dict(self.environment), "plan": _plan_text(job), "places": pack_places(places),
            "slots": slots,
        }  # fmt: skip


def _plan_text(job: JobSpec) -> str | None:
    """Return the plan for hosts that do not share our directory; None: none was given."""
    if job.plan_file is None:
        return None
    try:
        return job.plan_file.read_text(encoding="utf-8")
    except (OSError, ValueError) as problem:
        raise LaunchError(f"cannot read the plan of this job: {problem}", remedy="leave it where it is") from None


class HostConnections:
    """What the hosts of a job have in common: the handshake, and the beats by which they know that we live."""

    def __init__(self, work: RemoteJobSpec) -> None:
        self.work = work
        self.handshake: Handshake | None = None
        self.beats = Heartbeat()

    def connect(
        self, link: HostLink, reports: HostReports, *, aside: str, find_peers: FindPeers | None
    ) -> RemoteHost:
        """Begin to connect to a host; raise `LaunchError` when there is nothing to connect with.

        Args:
            aside: the folder of its files that are here already.
            find_peers: for a host that begins by itself, as soon as it knows its way to some other.
        """
        if self.handshake is None:
            self.handshake = Handshake(self.work.job.run_directory, self.work.environment.get("PYTHONPATH", ""))
        host = RemoteHost(
            link, self, reports, FileTaker(self.work.job.run_directory, aside, reports.say), find_peers
        )
        self.beats.links = [*(each for each in self.beats.links if each.is_open), link]
        return host

    def close(self) -> None:
        """End the beats, and take the file away by which hosts see whether they share our directory."""
        self.beats.stop()
        if self.handshake is not None:
            self.handshake.close()


class RemoteHost:
    """A connection, from its beginning to its end; a host that is used again gets another one."""

    def __init__(
        self, link: HostLink, shared: HostConnections, reports: HostReports, files: FileTaker,
        find_peers: FindPeers | None,
    ) -> None:  # fmt: skip
        """Begin to connect; raise `LaunchError` when there is nothing to connect with."""
        assert shared.handshake is not None, "it is made with the first connection"
        self.link, self.slots = link, 1
        self._shared, self._reports, self._files, self._find_peers = shared, reports, files, find_peers
        self._unfinished: set[int] = set()
        """Ranks or workers that were started there, and of whose end nothing was heard."""
        self._waiting: list[Message] = []
        """Workers to start once there is a connection."""
        self._has_left = False
        self._pauses = OwnPauses(time.monotonic())
        self._selector = selectors.EpollSelector()
        link.open(shared.work.setup, shared.handshake.hello)
        self._selector.register(link.channel.read_end, selectors.EVENT_READ)
        self._selector.register(link.stderr, selectors.EVENT_READ)

    @property
    def address(self) -> str | None:
        """Where others reach it; None: not known yet. Empty: it is this machine."""
        return str(self.link.ready["address"]) if self.link.ready else None

    @property
    def is_usable(self) -> bool:
        """Whether workers can be started by this connection, now or soon."""
        return self.link.is_open and not self._has_left

    def fileno(self) -> int:
        """Return a descriptor that is readable when `poll` has something to do."""
        return self._selector.fileno()

    # -- what it is told -------------------------------------------------------------------------

    def ask_route(self, addresses: Sequence[str], *, is_first: bool = False, more_may_come: bool = False) -> None:
        """Have it choose the interface that leads to `addresses`; the first also holds the port where all meet."""
        message = {
            "type": "peers",
            "addresses": list(addresses),
            "first": is_first,
            "more_may_come": more_may_come,
        }
        self.link.channel.send_message(message)
        self.link.phase = "connecting"

    def begin(self, job: JobSpec, places: Sequence[RankSpec] = ()) -> None:
        """Have it start the ranks in `places`, or, without any, the workers that are asked for."""
        self.link.channel.send_message(self._shared.work.start_message(job, places, len(places) or self.slots))
        self.link.phase = "running"
        self._unfinished |= {place.rank for place in places}
        waiting, self._waiting = self._waiting, []
        for order in waiting:
            self._start_now(order)

    def start(self, worker: int, host_name: str, variables: Mapping[str, str]) -> None:
        """Start a worker, as soon as there is a connection; `variables` are for it alone."""
        order = {"type": "worker", "worker": worker, "host": host_name, "variables": dict(variables)}
        if self.link.phase == "running":
            self._start_now(order)
        else:
            self._waiting.append(order)

    def _start_now(self, order: Message) -> None:
        self._unfinished.add(order["worker"])
        self.link.channel.send_message(order)

    def tell(self, worker: int, frame: Message) -> None:
        """Send a frame to a worker."""
        if worker in self._unfinished:
            self.link.channel.send_message({"type": "tell", "worker": worker, "frame": frame})

    def kill(self, worker: int) -> None:
        """End a worker and all that it has started; one that waits for the connection is not started."""
        if worker in self._unfinished:
            self.link.channel.send_message({"type": "kill", "worker": worker})
        elif any(worker == order["worker"] for order in self._waiting):
            self._waiting = [order for order in self._waiting if order["worker"] != worker]
            self._reports.ended(Exit(worker, -signal.SIGKILL, time.monotonic(), stopped_by_us=True))

    def stop(self, number: int) -> None:
        """Send a signal to all that runs there; what waits for the connection is ended by any but SIGUSR1."""
        if self.link.phase == "running":
            self.link.channel.send_message({"type": "signal", "number": number})
        elif number != signal.SIGUSR1:
            for order in list(self._waiting):
                self.kill(order["worker"])

    def take_stacks(self) -> None:
        """Have the stacks of all ranks there taken."""
        if self.link.phase == "running":
            self.link.channel.send_message({"type": "stacks"})

    def leave(self) -> bool:
        """Have the files sent, if the host was ever started; return whether all is here."""
        if self.link.phase != "running":
            return True  # never started, or done
        if not self._has_left:
            self._has_left = True
            self.link.channel.send_message({"type": "leave"})
        return False

    def close(self) -> None:
        """Hang up, if that was not done: the host's agent ends what runs there."""
        if self.link.is_open:
            self.link.close("gone")
        self._selector.close()

    # -- listening -------------------------------------------------------------------------------

    def poll(self) -> None:
        """Deal with what has come."""
        self._mind_pauses(time.monotonic())
        for key, _ in self._selector.select(0):
            if not self.link.is_open:
                return  # it was given up, perhaps for what came before in this very batch
            if key.fd == self.link.stderr:
                if not self.link.read_stderr():
                    self._selector.unregister(self.link.stderr)
            elif failure := self._listen():
                self._reports.lost(self, failure)

    def tick(self, now: float) -> None:
        """Send what waits, look for a sign of life, and begin when it can by itself."""
        if not self.link.is_open:
            return
        self._mind_pauses(now)
        self.link.channel.flush()
        if silent := why_silent(self.link, now):
            self._reports.lost(self, silent)
        elif self.link.phase == "ready" and self._find_peers is not None:
            peers = self._find_peers(self)
            if peers is not None:
                self.ask_route(peers, more_may_come=True)

    def _mind_pauses(self, now: float) -> None:
        """When this process was suspended, messages that came meanwhile are still unread."""
        if self._pauses.look(now):
            self.link.channel.patience.reset(now)

    def _listen(self) -> HostFailure | None:
        """Pass on what has come; return why the host is to be given up, None: it is not."""
        link = self.link
        try:
            for kind, payload in link.channel.receive():
                failure = None
                if kind == OUTPUT:
                    number, is_error, data = read_output(payload)
                    self._reports.printed(self._check(number, "output"), is_error, data)
                elif kind == FILE:
                    self._files.take(payload)
                elif kind == MESSAGE:
                    failure = self._hear(read_json(payload))
                if failure is not None or not link.is_open:
                    return failure
        except (FrameError, KeyError, TypeError, ValueError) as problem:
            return nonsense(problem)
        if not link.channel.ended:
            return None
        now = time.monotonic()
        still = self._shared.beats.pauses.recent_seconds(now)
        return why_hung_up(link, self._shared.work.setup, now, stood_still_seconds=still)

    def _hear(self, message: Message) -> HostFailure | None:
        kind, link = message["type"], self.link
        if kind == "ready":
            return self._greet(message)
        if kind == "failed":
            return HostFailure(str(message["why"]), str(message["remedy"]))
        if kind == "say":
            self._reports.say(f"host {link.name}: {str(message['text'])[:500]}")
        elif kind == "route":
            link.route, link.phase = message, "routed"
            if self._find_peers is not None:
                self.begin(self._shared.work.job)
        elif kind == "done":
            if not self._has_left:
                raise FrameError("it is done before it was let go")
            link.close("done")
        else:
            self._pass_on(kind, message)
        return None

    def _greet(self, ready: Message) -> HostFailure | None:
        """Take the host's answer to our first words; return why it may not take part."""
        handshake = self._shared.handshake
        assert handshake is not None, "it was sent"
        check_ready(ready)
        self.link.ready, self.link.phase = ready, "ready"
        for warning in handshake.warnings(self.link.name, ready):
            self._reports.say(warning)
        return handshake.refusal(ready, self._shared.work.setup)

    def _pass_on(self, kind: str, message: Message) -> None:
        """Report what a rank or worker did."""
        if kind == "heard":
            self._reports.heard(self._check(message["worker"], "a frame"), message["frame"])
        elif kind == "crash":
            crash = unpack_crash(message["crash"])
            self._check(crash.rank, "a crash")
            crash.write(self._shared.work.job.run_directory)
            self._reports.crashed(replace(crash, host=self.link.name))
        elif kind == "positions":
            from ...core.failures import Position

            found = [Position.from_json(str(text)) for text in message["positions"]]
            self._reports.stood(position for position in found if position is not None)
        elif kind == "exit":
            number = self._check(message["rank"], "the end")
            self._unfinished.remove(number)
            self._reports.ended(
                Exit(
                    number, int(message["code"]), time.monotonic(), bool(message["stopped"]), str(message["held"]),
                    bool(message["is_missed"]), self.link.name, bool(message["out_of_memory"]),
                )
            )  # fmt: skip

    def _check(self, number: int, what: str) -> int:
        if int(number) not in self._unfinished:
            raise FrameError(f"{what} of {number}, which does not run there")
        return int(number)


# A job of fixed ranks on many hosts: connects to all, arranges the rendezvous, and starts the ranks.


class RemoteJob(FixedJob):
    """Runs one command as the ranks of many hosts; when it has ended, all files are here."""

    def __init__(
        self, wanted: Sequence[tuple[str, Sequence[RankSpec], Sequence[str]]], work: RemoteJobSpec, output: Output,
        status: Callable[[], str | None] = lambda: None,
    ) -> None:  # fmt: skip
        """`wanted`: of each host its name, its ranks, and what connects us to it."""
        super().__init__(output, work.job, status)
        self._wanted, self._work = wanted, work
        self._ssh_hosts: list[RemoteHost] = []
        self._is_running = False

    def _begin(self, at_last: ExitStack) -> None:
        shared = HostConnections(self._work)
        at_last.callback(shared.close)
        for name, _, command in self._wanted:
            host = shared.connect(HostLink(name, command), self, aside=name, find_peers=None)
            self._ssh_hosts.append(host)
            self.hosts.add(host, name)
        shared.beats.start()

    def _needs(self, names: set[str]) -> bool:
        return not self._is_running

    def _decide(self, now: float) -> None:
        super()._decide(now)
        if not self._is_ending and not self._is_running:
            self._advance()

    def _advance(self) -> None:
        """Go on to the next phase when all hosts are ready for it."""
        phases = {host.link.phase for host in self._ssh_hosts}
        if phases == {"ready"}:
            addresses = [str(host.address) for host in self._ssh_hosts]
            for index, host in enumerate(self._ssh_hosts):
                # The first is met by all: its way to the second is its way to all of them.
                host.ask_route(addresses[1:] if index == 0 else addresses[:1], is_first=index == 0)
        elif phases == {"routed"}:
            self._is_running = True
            first = self._ssh_hosts[0].link.route
            job = replace(self._work.job, address=first["address"], port=first["port"])
            for host, (name, places, _) in zip(self._ssh_hosts, self._wanted, strict=True):
                self.hosts.add(host, name, [place.rank for place in places])
                host.begin(job, places)

    def _may_be_a_host(self, now: float) -> bool:
        links = [host.link for host in self._ssh_hosts]
        return any(link.is_open and link.silent_seconds(now) > SUSPECT_SECONDS for link in links)
