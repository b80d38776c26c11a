"""A job on many hosts: connects to all, arranges the rendezvous, starts the ranks, and decides how it ends.

[Note: cause across hosts] A host that is lost makes the ranks of other hosts fail, within milliseconds or
much later, and the news of its loss comes last. So an exception that only tells of another rank is not
believed while a host is suspiciously silent; and a loss counts from the moment the host fell silent.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from ...core.framing import FrameError, read_json
from ...core.vocabulary.errors import LaunchError
from ...core.vocabulary.run_files import Crash
from ..job.contract import JobSpec
from ..output import Output
from ..supervise.failure import Exit, Failure, find_failure, find_suspects, is_hang
from ..supervise.job_loop import FixedJob
from ..supervise.stopped_process import OwnPauses
from .agent_base import FileTaker
from .link.frames import FILE, MESSAGE, OUTPUT, Message, read_output
from .link.host_failure import Handshake, HostFailure, check_ready, nonsense, why_hung_up, why_silent
from .link.host_link import HostLink, Phase
from .link.protocol import SUSPECT_SECONDS, Heartbeat, pack_job, pack_places, unpack_crash
from .link.remote_shell import AGENT, HostSetup


class RemoteJob(FixedJob):
    """Runs one command as the ranks of many hosts; when it has ended, all files are here."""

    def __init__(
        self, links: Sequence[HostLink], work: RemoteJobSpec, output: Output,
        status: Callable[[], str | None] = lambda: None,
    ) -> None:  # fmt: skip
        super().__init__(output, work.job, status)
        self.links, self.work = links, work
        self._listeners: dict[str, HostListener] = {}
        self._known_crashes: list[Crash] = []
        self._losses: list[Loss] = []

    # -- starting --------------------------------------------------------------------------------

    def _begin(self, at_end: ExitStack) -> None:
        beats = Heartbeat()
        directory = self.work.job.run_directory
        handshake = Handshake(directory, self.work.environment.get("PYTHONPATH", ""))
        at_end.callback(handshake.close)
        for link in self.links:
            listener = self._listeners[link.name] = HostListener(
                link, self.work, handshake, FileTaker(directory, link.name, self.say), printed=self.output.feed,
                take=self._take, lose=self._lose, say=self.say, stood_still_seconds=beats.pauses.recent_seconds,
            )  # fmt: skip
            at_end.callback(listener.close)
            self._selector.register(listener, selectors.EVENT_READ, listener.poll)
        beats.links += self.links
        at_end.callback(beats.stop)
        beats.start()

    def _advance(self) -> None:
        """Go on to the next phase when all hosts are ready for it."""
        phases = {link.phase for link in self.links}
        if self._losses or self._signals:
            return
        if phases == {"ready"}:
            addresses = [link.ready["address"] for link in self.links]
            for index, link in enumerate(self.links):
                # The first is met by all: its way to the second is its way to all of them.
                peers = addresses[1:] if index == 0 else addresses[:1]
                link.channel.send_message({"type": "peers", "addresses": peers, "first": index == 0})
                link.phase = "connecting"
        elif phases == {"routed"}:
            first = self.links[0].route
            job = replace(self.work.job, address=first["address"], port=first["port"])
            for link in self.links:
                self.work.start(link, job, places=pack_places(link.places), bind=self.work.bind)

    # -- listening -------------------------------------------------------------------------------

    def _take(self, link: HostLink, message: Message) -> None:
        kind, now = message["type"], time.monotonic()
        if kind == "exit":
            rank, code = int(message["rank"]), int(message["code"])
            if rank not in link.unfinished:
                raise FrameError(f"the end of rank {rank}, which does not run there")
            link.unfinished.remove(rank)
            held = self.output.finish(rank, failed=code != 0)
            ended = Exit(rank, code, now, bool(message["stopped"]), held, bool(message["is_missed"]))
            self._exits.append(ended)
        elif kind == "crash":
            crash = unpack_crash(message["crash"])
            if crash.rank not in {place.rank for place in link.places}:
                raise FrameError(f"a crash of rank {crash.rank}, which does not run there")
            self._known_crashes.append(crash)
            crash.write(self.work.job.run_directory)
        elif kind == "positions":
            from ...core.failures import Position

            found = [Position.from_json(str(text)) for text in message["positions"]]
            self._positions |= {position.rank: position for position in found if position is not None}
        elif kind == "done":
            link.out_of_memory = bool(message["out_of_memory"])
            self._hang_up(link, "done")

    def _lose(self, link: HostLink, failure: HostFailure) -> None:
        """Give a host up: its agent ends the ranks there."""
        ranks = tuple(sorted(link.unfinished)) if link.phase == "running" else ()
        when = time.monotonic() if failure.when_seconds is None else failure.when_seconds
        self._losses.append(Loss(link, when, failure, ranks))
        for rank in ranks:
            self.output.finish(rank, failed=True)
        self._hang_up(link, "gone")

    def _hang_up(self, link: HostLink, phase: Phase) -> None:
        self._selector.unregister(self._listeners[link.name])
        link.close(phase)

    # -- deciding --------------------------------------------------------------------------------

    def _goes_on(self) -> bool:
        return any(link.is_open for link in self.links)

    def _decide(self, now: float) -> None:
        for link in self.links:
            self._listeners[link.name].tick(now)
            if link.is_open and link.ready and link.unfinished and self._is_late(now):
                self._lose(link, HostFailure("its ranks did not stop in time"))
        self._advance()
        super()._decide(now)

    def _crashes(self) -> Sequence[Crash]:
        return self._known_crashes

    def _has_failed(self, now: float) -> bool:
        if self._losses or any(not crash.consequence for crash in self._known_crashes):
            return True
        suspects = find_suspects(self._judged(), self._known_crashes)
        late = any(link.is_open and link.silent_seconds(now) > SUSPECT_SECONDS for link in self.links)
        return bool(suspects) and not (suspects[0].is_consequence and late)

    def _is_explained(self) -> bool:
        is_hanging = is_hang(self._judged(), self._known_crashes)
        return super()._is_explained() or (bool(self._losses) and not is_hanging)

    def _settle_seconds(self) -> float:
        # A host that was lost has no more to say, and what it took along can only fail.
        return 0.0 if self._losses else super()._settle_seconds()

    def _take_stacks(self) -> None:
        for link in self.links:
            if link.phase == "running":
                link.channel.send_message({"type": "stacks"})

    def _signal_ranks(self, number: int) -> None:
        for link in self.links:
            if link.phase == "running" or (link.ready and link.is_open and number != signal.SIGUSR1):
                link.channel.send_message({"type": "signal", "number": number})
            elif link.is_open and number != signal.SIGUSR1:
                self._hang_up(link, "gone")

    def _find_failure(self, stop_seconds: float) -> Failure | None:
        return find_cause(self._judged(), self._known_crashes, self._losses, self.links, stop_seconds)


# Why a job on many hosts stopped: a rank's failure, or the loss of a host as a whole.
#
# See [Note: cause across hosts].


@dataclass(frozen=True)
class Loss:
    """A host that failed as a whole."""

    link: HostLink
    when_seconds: float
    failure: HostFailure
    ranks: tuple[int, ...] = ()
    """Those that were running there."""


def find_cause(
    exits: Sequence[Exit], crashes: Sequence[Crash], losses: Sequence[Loss], links: Sequence[HostLink],
    stop_seconds: float,
) -> Failure | None:  # fmt: skip
    """Return the first cause; None when nothing failed."""
    suspects = find_suspects(exits, crashes)
    first = min(losses, key=lambda loss: loss.when_seconds, default=None)
    if first is not None and (not suspects or (0, first.when_seconds) < suspects[0].order):
        return _of_loss(first, exits, crashes, stop_seconds)
    if not suspects:
        return None
    failure = find_failure(
        exits, crashes, host="", stop_seconds=stop_seconds,
        out_of_memory=any(link.out_of_memory for link in links),
    )  # fmt: skip
    host = next(link.name for link in links if failure.rank in {place.rank for place in link.places})
    return replace(failure, host=host)


def _of_loss(loss: Loss, exits: Sequence[Exit], crashes: Sequence[Crash], stop_seconds: float) -> Failure:
    also = tuple(suspect.exit.rank for suspect in find_suspects(exits, crashes))
    stopped = {ended.rank for ended in exits if ended.code != 0} - set(also)
    failure, is_ours = loss.failure, loss.failure.is_ours
    running = f" (ranks {', '.join(map(str, loss.ranks))} ran there)" if loss.ranks and not is_ours else ""
    return Failure(
        None, "" if is_ours else loss.link.name, f"{failure.cause}{running}", failure.exit_code,
        also_failed=tuple(sorted(also)), stopped=tuple(sorted(stopped)), stop_seconds=stop_seconds,
        remedy=failure.remedy,
    )  # fmt: skip


# What every host of a job over ssh is asked to run, and what is done with all that it sends.


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
