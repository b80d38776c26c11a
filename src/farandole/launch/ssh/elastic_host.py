"""One host of an elastic job over ssh, as the driver has it: a `WorkerHost`.

What is asked of it before it is connected waits. When it fails, it is reported as lost, whatever it was doing.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...core.wire.framing import FrameError, read_json
from ..elastic.control import Frame
from ..elastic.worker_host import Reports
from ..supervise.failure import Exit
from ..supervise.failure_detector import OwnPauses
from .agent.files import FileTaker
from .link.frames import FILE, MESSAGE, OUTPUT, Message, read_output
from .link.handshake import Handshake, check_ready
from .link.host_failure import HostFailure, nonsense, why_hung_up, why_silent
from .link.host_link import HostLink
from .link.protocol import pack_job, unpack_crash
from .link.remote_shell import Trouble
from .remote_job import RemoteJobSpec

ELASTIC_AGENT = "farandole.launch.ssh.agent.elastic_agent"
FindPeers = Callable[["ElasticHost"], Sequence[str] | None]
"""Returns addresses of other hosts, "" for the launcher's; None: they are not known yet."""


class ElasticHost:
    """A connection, from its beginning to its end; a host that is used again gets another one."""

    def __init__(
        self, link: HostLink, work: RemoteJobSpec, reports: Reports, *, slots: int, greeting: Handshake,
        find_peers: FindPeers, taker: FileTaker, stood_still_seconds: Callable[[float], float],
    ) -> None:  # fmt: skip
        """Begin to connect; raise `LaunchError` when there is nothing to connect with."""
        self.link = link
        self._slots, self._work, self._greeting, self._reports = slots, work, greeting, reports
        self._find_peers, self._taker = find_peers, taker
        self._stood_still_seconds = stood_still_seconds
        self._waiting: list[Message] = []
        """Workers to start once there is a connection."""
        self._has_left = False
        self._pauses = OwnPauses(time.monotonic())
        self._selector = selectors.DefaultSelector()
        link.open(work.setup, greeting.hello, ELASTIC_AGENT)
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
        selector: Any = self._selector
        return int(selector.fileno())

    def poll(self) -> None:
        """Deal with what has come."""
        self._mind_pauses(time.monotonic())
        for key, _ in self._selector.select(0):
            if key.fd == self.link.channel.read_end:
                self._listen()
            elif self.link.is_open and not self.link.read_stderr():
                self._selector.unregister(self.link.stderr)

    def tick(self, now: float) -> None:
        """Send what waits, and look for a sign of life."""
        if not self.link.is_open:
            return
        self._mind_pauses(now)
        self.link.channel.flush()
        if self.link.phase == "ready":
            peers = self._find_peers(self)
            if peers is not None:
                message = {"type": "peers", "addresses": list(peers), "first": False, "more_may_come": True}
                self.link.channel.send_message(message)
                self.link.phase = "connecting"
        if silent := why_silent(self.link, now):
            self._lose(silent)

    def _mind_pauses(self, now: float) -> None:
        if self._pauses.look(now):
            self.link.channel.patience.reset(now)

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
        """Send a signal to a worker; one that waits for the connection is ended by any."""
        if worker in self.link.unfinished:
            self.link.channel.send_message({"type": "signal", "worker": worker, "number": number})
        elif any(worker == order["worker"] for order in self._waiting):
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
        if self.link.is_open:
            self.link.close("gone")
        self._selector.close()

    # -- listening -------------------------------------------------------------------------------

    def _listen(self) -> None:
        link = self.link
        try:
            for kind, payload in link.channel.receive():
                if kind == OUTPUT:
                    worker, is_error, data = read_output(payload)
                    self._check(worker)
                    self._reports.printed(worker, is_error, data)
                elif kind == FILE:
                    self._taker.take(payload)
                elif kind == MESSAGE:
                    self._hear(read_json(payload))
                if not link.is_open:
                    return
        except (FrameError, KeyError, TypeError, ValueError) as problem:
            self._lose(nonsense(problem))
            return
        if link.channel.ended:
            now = time.monotonic()
            still = self._stood_still_seconds(now)
            self._lose(why_hung_up(link, self._work.setup, now, stood_still_seconds=still))

    def _hear(self, message: Message) -> None:
        kind, link = message["type"], self.link
        if kind == "ready":
            check_ready(message)
            link.ready, link.phase = message, "ready"
            refusal = self._greeting.refusal(message, self._work.setup)
            if refusal is not None:
                self._lose(refusal)
                return
            for warning in self._greeting.warnings(link.name, message):
                self._reports.say(warning)
        elif kind == "route":
            link.route = message
            self._begin()
        elif kind == "heard":
            worker = int(message["worker"])
            self._check(worker)
            self._reports.heard(worker, message["frame"])
        elif kind == "say":
            self._reports.say(f"host {link.name}: {message['text']}")
        elif kind == "exit":
            self._has_ended(message)
        elif kind == "failed":
            self._lose(HostFailure(Trouble(str(message["why"]), str(message["remedy"]))))
        elif kind == "done":
            if not self._has_left:
                raise FrameError("it is done before it was let go")
            link.close("done")

    def _begin(self) -> None:
        """The host knows its interface: have workers started."""
        work = self._work
        message = {
            "type": "start", "command": list(work.command), "job": pack_job(work.job), "slots": self._slots,
            "environment": dict(work.environment), "plan": work.plan,
        }  # fmt: skip
        self.link.channel.send_message(message)
        self.link.phase = "running"
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

    def _lose(self, ending: HostFailure) -> None:
        trouble = ending.trouble
        self._reports.lost(self, trouble.cause, remedy=trouble.remedy, exit_code=ending.exit_code)
