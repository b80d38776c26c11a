"""One host of an elastic job over ssh, as the driver has it: a `WorkerHost`.

What is asked of it before it is connected waits. When it fails, it is reported as lost, whatever it was doing.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from ...core.framing import FrameError
from ...core.vocabulary.errors import ConfigError
from ..elastic.control import Frame
from ..elastic.workers import HostPool, Reports, WorkerHost
from ..job.hosts import Host, need_ssh
from ..supervise.failure import Exit
from .agent_base import FileTaker
from .job import HostListener, RemoteJobSpec
from .link.frames import Message
from .link.host_failure import Handshake, HostFailure
from .link.host_link import HostLink
from .link.protocol import Heartbeat, unpack_crash

# The hosts of an elastic job that may be anywhere: a `HostPool`.
#
# As long as all names mean this machine there is no connection at all. Whether that is so is seen from the first
# list of hosts, because it decides by which interface the workers meet.


class SshHostPool:
    """Reaches every host over ssh, or all of them as `alone` does when none is elsewhere."""

    def __init__(
        self,
        work: RemoteJobSpec,
        find: Callable[[str], Host],
        command_for: Callable[[Host], Sequence[str]],
        alone: HostPool,
    ) -> None:
        """`find` says how a host is reached by its name, `command_for` returns what connects us to it.

        `command_for` raises `ConfigError` for a name that is none.
        """
        self._work, self._find, self._command_for, self._alone = work, find, command_for, alone
        self._is_spread: bool | None = None
        self._handshake: Handshake | None = None
        self._beats = Heartbeat()
        self._hosts: dict[str, ElasticHost] = {}
        """The latest connection to each."""
        self._count: dict[str, int] = {}
        """How often each was connected to."""

    def hosts_are(self, names: Collection[str]) -> None:
        """Take the names that there are from now on; the first ones say whether any host is elsewhere."""
        if self._is_spread is None and names:
            self._is_spread = need_ssh(map(self._find, names))

    def reach(self, name: str, slots: int, reports: Reports) -> WorkerHost:
        """Return the connection to a host, or begin one."""
        if not self._is_spread:
            if need_ssh([self._find(name)]):
                raise ConfigError(
                    "this job began on this machine alone, where its ranks meet by the loopback interface",
                    remedy="have a host that is not this machine in the list when the job starts",
                )
            return self._alone.reach(name, slots, reports)
        known = self._hosts.get(name)
        if known is not None and known.is_usable:
            return known
        command = self._command_for(self._find(name))
        if self._handshake is None:
            self._handshake = Handshake(self._work.job.run_directory, self._work.environment.get("PYTHONPATH", ""))
            self._beats.start()
        count = self._count[name] = self._count.get(name, 0) + 1
        aside = name if count == 1 else f"{name}-{count}"
        files = FileTaker(self._work.job.run_directory, aside, reports.say)
        link = HostLink(name, (), command)
        host = ElasticHost(
            link, self._work, reports, slots=slots, handshake=self._handshake, find_peers=self._peers_of,
            files=files, stood_still_seconds=self._beats.pauses.recent_seconds,
        )  # fmt: skip
        self._hosts[name] = host
        self._beats.links = [each.link for each in self._hosts.values() if each.link.is_open]
        return host

    def close(self) -> None:
        """End the beats, and take the file away by which hosts see whether they share our directory."""
        self._beats.stop()
        if self._handshake is not None:
            self._handshake.close()
        self._alone.close()

    def _peers_of(self, host: ElasticHost) -> Sequence[str] | None:
        """Return addresses that `host` has to reach; None: wait for others, which are being connected to.

        A host elsewhere can take the way to the launcher. This machine cannot: it has to know another one.
        """
        others = [each for each in self._hosts.values() if each is not host and each.link.is_open]
        known = [each.address for each in others if each.address]
        if known or host.address:
            return known or [""]
        return None if any(each.address is None for each in others) else []


ELASTIC_AGENT = "farandole.launch.ssh.elastic_agent"
FindPeers = Callable[["ElasticHost"], Sequence[str] | None]
"""Returns addresses of other hosts, "" for the launcher's; None: they are not known yet."""


class ElasticHost:
    """A connection, from its beginning to its end; a host that is used again gets another one."""

    def __init__(
        self, link: HostLink, work: RemoteJobSpec, reports: Reports, *, slots: int, handshake: Handshake,
        find_peers: FindPeers, files: FileTaker, stood_still_seconds: Callable[[float], float],
    ) -> None:  # fmt: skip
        """Begin to connect; raise `LaunchError` when there is nothing to connect with."""
        self.link = link
        self._slots, self._work, self._reports, self._find_peers = slots, work, reports, find_peers
        self._waiting: list[Message] = []
        """Workers to start once there is a connection."""
        self._has_left = False
        self._listener = HostListener(
            link, work, handshake, files, printed=reports.printed, take=self._take, lose=self._lose,
            say=reports.say, stood_still_seconds=stood_still_seconds, agent=ELASTIC_AGENT,
        )  # fmt: skip

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
        return self._listener.fileno()

    def poll(self) -> None:
        """Deal with what has come."""
        self._listener.poll()

    def tick(self, now: float) -> None:
        """Send what waits, and look for a sign of life."""
        self._listener.tick(now)
        if self.link.phase == "ready" and (peers := self._find_peers(self)) is not None:
            message = {"type": "peers", "addresses": list(peers), "first": False, "more_may_come": True}
            self.link.channel.send_message(message)
            self.link.phase = "connecting"

    def start(self, worker: int, host_name: str, variables: Mapping[str, str]) -> None:
        """Start a worker, as soon as there is a connection."""
        order = {"type": "worker", "worker": worker, "host": host_name, "variables": dict(variables)}
        if self.link.phase == "running":
            self._start_now(order)
        else:
            self._waiting.append(order)

    def tell(self, worker: int, frame: Frame) -> None:
        """Send a frame to a worker."""
        if worker in self.link.unfinished:
            self.link.channel.send_message({"type": "tell", "worker": worker, "frame": frame})

    def signal(self, worker: int, number: int) -> None:
        """Send a signal to a worker; one that waits for the connection is ended by any but SIGUSR1."""
        if worker in self.link.unfinished:
            self.link.channel.send_message({"type": "signal", "worker": worker, "number": number})
        elif number != signal.SIGUSR1 and any(worker == order["worker"] for order in self._waiting):
            self._waiting = [order for order in self._waiting if order["worker"] != worker]
            killed = Exit(worker, -signal.SIGKILL, time.monotonic(), stopped_by_us=True)
            self._reports.ended(killed, (), out_of_memory=False)

    def leave(self) -> bool:
        """Have the files sent, if the host was ever started; return whether all is here."""
        if self.link.phase != "running":
            return True  # never started, or done
        if not self._has_left:
            self._has_left = True
            self.link.channel.send_message({"type": "leave"})
        return False

    def close(self) -> None:
        """Hang up: its agent ends what runs there."""
        self._listener.close()

    # -- listening -------------------------------------------------------------------------------

    def _take(self, link: HostLink, message: Message) -> None:
        kind = message["type"]
        if kind == "route":
            self._begin()
        elif kind == "heard":
            worker = int(message["worker"])
            self._check(worker)
            self._reports.heard(worker, message["frame"])
        elif kind == "exit":
            self._has_ended(message)
        elif kind == "done":
            if not self._has_left:
                raise FrameError("it is done before it was let go")
            link.close("done")

    def _begin(self) -> None:
        """The host knows its interface: have workers started."""
        self._work.start(self.link, self._work.job, slots=self._slots)
        waiting, self._waiting = self._waiting, []
        for order in waiting:
            self._start_now(order)

    def _start_now(self, order: Message) -> None:
        self.link.unfinished.add(order["worker"])
        self.link.channel.send_message(order)

    def _has_ended(self, message: Message) -> None:
        worker = int(message["rank"])
        self._check(worker)
        crashes = [unpack_crash(values) for values in message["crashes"]]
        for crash in crashes:
            if crash.rank != worker:
                raise FrameError(f"a crash of worker {crash.rank}, told of worker {worker}")
            crash.write(self._work.job.run_directory)
        self.link.unfinished.remove(worker)
        ended = Exit(worker, int(message["code"]), time.monotonic(), held=str(message["held"]))
        self._reports.ended(ended, crashes, out_of_memory=bool(message["out_of_memory"]))

    def _check(self, worker: int) -> None:
        if worker not in self.link.unfinished:
            raise FrameError(f"news of worker {worker}, which does not run there")

    def _lose(self, _: HostLink, failure: HostFailure) -> None:
        self._reports.lost(self, failure.cause, remedy=failure.remedy, exit_code=failure.exit_code)
