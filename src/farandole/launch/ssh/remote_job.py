"""What every host of a job over ssh is asked to run, and what is done with all that it sends."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.framing import FrameError, read_json
from ...core.vocabulary.errors import LaunchError
from ..job.contract import JobSpec
from ..supervise.stopped_process import OwnPauses
from .agent.files import FileTaker
from .link.frames import FILE, MESSAGE, OUTPUT, Message, read_output
from .link.host_failure import Handshake, HostFailure, check_ready, nonsense, why_hung_up, why_silent
from .link.host_link import HostLink
from .link.protocol import pack_job
from .link.remote_shell import AGENT, HostSetup


@dataclass(frozen=True)
class RemoteJobSpec:
    """A command, and what it gets."""

    command: Sequence[str]
    job: JobSpec
    """Its address and port are found while the job starts."""
    setup: HostSetup
    environment: Mapping[str, str]
    """What every rank gets beside its host's own environment."""
    bind: bool = True

    def start(self, link: HostLink, job: JobSpec, **of_host: Any) -> None:
        """Have a host start what all hosts get, and `of_host`; `job` is ours with what was found meanwhile."""
        message = {
            "type": "start", "command": list(self.command), "job": pack_job(job),
            "environment": dict(self.environment), "plan": _plan_text(job), **of_host,
        }  # fmt: skip
        link.channel.send_message(message)
        link.phase = "running"


def _plan_text(job: JobSpec) -> str | None:
    """Return the plan for hosts that do not share our directory; None: none was given."""
    if job.plan_file is None:
        return None
    try:
        return job.plan_file.read_text(encoding="utf-8")
    except (OSError, ValueError) as problem:
        raise LaunchError(f"cannot read the plan of this job: {problem}", remedy="leave it where it is") from None


@dataclass(eq=False)
class HostListener:
    """Connects to one host and reads its pipe, whatever runs there, inside the loop of its owner."""

    link: HostLink
    work: RemoteJobSpec
    handshake: Handshake
    files: FileTaker
    printed: Callable[[int, bool, bytes], None]
    """Takes what a rank or worker of the host printed."""
    take: Callable[[HostLink, Message], None]
    """Takes a message about ranks or workers, and that the host knows its route; may raise `FrameError`."""
    lose: Callable[[HostLink, HostFailure], None]
    """Gives the host up."""
    say: Callable[[str], None]
    stood_still_seconds: Callable[[float], float]
    """Returns for how long this launcher stood still a moment ago."""
    agent: str = AGENT

    def __post_init__(self) -> None:
        """Begin to connect; raise `LaunchError` when there is nothing to connect with."""
        self._pauses = OwnPauses(time.monotonic())
        self._selector = selectors.EpollSelector()
        self.link.open(self.work.setup, self.handshake.hello, self.agent)
        self._selector.register(self.link.channel.read_end, selectors.EVENT_READ)
        self._selector.register(self.link.stderr, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `poll` has something to do."""
        return self._selector.fileno()

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
                self.lose(self.link, failure)

    def tick(self, now: float) -> None:
        """Send what waits, and look for a sign of life."""
        if self.link.is_open:
            self._mind_pauses(now)
            self.link.channel.flush()
            if silent := why_silent(self.link, now):
                self.lose(self.link, silent)

    def close(self) -> None:
        """Hang up, if that was not done: the host's agent ends what runs there."""
        if self.link.is_open:
            self.link.close("gone")
        self._selector.close()

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
                    rank, is_error, data = read_output(payload)
                    if rank not in link.unfinished:
                        raise FrameError(f"output of {rank}, which does not run there")
                    self.printed(rank, is_error, data)
                elif kind == FILE:
                    self.files.take(payload)
                elif kind == MESSAGE:
                    failure = self._hear(read_json(payload))
                if failure is not None or not link.is_open:
                    return failure
        except (FrameError, KeyError, TypeError, ValueError) as problem:
            return nonsense(problem)
        if not link.channel.ended:
            return None
        now = time.monotonic()
        still = self.stood_still_seconds(now)
        return why_hung_up(link, self.work.setup, now, stood_still_seconds=still)

    def _hear(self, message: Message) -> HostFailure | None:
        kind, link = message["type"], self.link
        if kind == "ready":
            check_ready(message)
            link.ready, link.phase = message, "ready"
            for warning in self.handshake.warnings(link.name, message):
                self.say(warning)
            return self.handshake.refusal(message, self.work.setup)
        if kind == "failed":
            return HostFailure(str(message["why"]), str(message["remedy"]))
        if kind == "say":
            self.say(f"host {link.name}: {str(message['text'])[:500]}")
            return None
        if kind == "route":
            link.route, link.phase = message, "routed"
        self.take(link, message)
        return None
