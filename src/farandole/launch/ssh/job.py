"""A job on many hosts: connects to all, arranges the rendezvous, starts the ranks, and decides how it ends.

[Note: cause across hosts] A host that is lost makes the ranks of other hosts fail, within milliseconds or
much later, and the news of its loss comes last. So an exception that only tells of another rank is not
believed while a host is suspiciously silent; and a loss counts from the moment the host fell silent.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ...core.vocabulary.run_files import Crash
from ...core.wire.framing import FrameError, read_json
from ..output.rank_output import Output
from ..output.status import STATUS_SECONDS, show_status
from ..supervise.failure import Exit, find_suspects, is_explained, is_hang
from ..supervise.failure_detector import OwnPauses
from ..supervise.local import Outcome
from ..supervise.stacks import STACKS_SECONDS
from ..supervise.stopping import SETTLE_SECONDS, UNEXPLAINED_SECONDS, SignalHandling
from .agent.files import FileTaker
from .link.frames import FILE, MESSAGE, OUTPUT, Message, read_output
from .link.handshake import Handshake, check_ready
from .link.heartbeat import Heartbeat
from .link.host_failure import HostFailure, nonsense, why_hung_up, why_silent
from .link.host_link import HostLink
from .link.protocol import LEAVE_SECONDS, SUSPECT_SECONDS, pack_job, pack_places, unpack_crash
from .link.remote_shell import Trouble
from .remote_job import RemoteJobSpec
from .root_cause import Loss, find_cause


@dataclass(eq=False)
class RemoteJob(SignalHandling):
    """Runs one command as the ranks of many hosts. Use once."""

    links: Sequence[HostLink]
    work: RemoteJobSpec
    output: Output
    status: Callable[[], str | None] = lambda: None
    _exits: list[Exit] = field(init=False, default_factory=list)
    _crashes: list[Crash] = field(init=False, default_factory=list)
    _losses: list[Loss] = field(init=False, default_factory=list)
    _greeting: Handshake | None = field(init=False, default=None)
    _takers: dict[str, FileTaker] = field(init=False, default_factory=dict)
    _failed_at: float | None = field(init=False, default=None)
    _give_up_at: float | None = field(init=False, default=None)

    def run(self) -> Outcome:
        """Start all ranks and return when all are gone, and all files here."""
        begin = time.monotonic()
        self._pauses = OwnPauses(begin)
        next_status = begin + STATUS_SECONDS
        previous = self._catch_signals()
        beats = self._beats = Heartbeat()
        try:
            self._greeting = Handshake(self.work.job.run_directory, self.work.environment.get("PYTHONPATH", ""))
            self._connect()
            beats.links += self.links
            beats.start()
            while any(link.is_open for link in self.links):
                self._poll()
                now = time.monotonic()
                self._advance()
                self._watch(now)
                self._decide(now)
                self._send_due(now)
                if now >= next_status:
                    next_status = now + show_status(self.output, None if self._stopping else self.status())
        finally:
            beats.stop()
            if self._greeting is not None:
                self._greeting.close()
            for link in self.links:
                if link.is_open and hasattr(link, "process"):
                    link.close("gone")
            self._selector.close()
            self._release_signals(previous)
            self.output.status(None)
        return self._outcome(time.monotonic(), begin)

    # -- starting --------------------------------------------------------------------------------

    def _connect(self) -> None:
        assert self._greeting is not None, "it was made"
        for link in self.links:
            link.open(self.work.setup, self._greeting.hello)
            self._takers[link.name] = FileTaker(self.work.job.run_directory, link.name, self._say)
            self._selector.register(link.channel.read_end, selectors.EVENT_READ, (link, False))
            self._selector.register(link.stderr, selectors.EVENT_READ, (link, True))

    def _say(self, text: str) -> None:
        self.output.say(f"farandole: {text}")

    def _advance(self) -> None:
        """Go on to the next phase when all hosts are ready for it."""
        phases = {link.phase for link in self.links}
        if self._losses or self._signals:
            return
        if phases == {"ready"} and self._are_alike():
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
                message = {
                    "type": "start", "command": list(self.work.command), "places": pack_places(link.places),
                    "job": pack_job(job), "environment": dict(self.work.environment), "bind": self.work.bind,
                    "plan": self.work.plan,
                }  # fmt: skip
                link.channel.send_message(message)
                link.phase = "running"

    def _are_alike(self) -> bool:
        """Refuse hosts with another farandole; warn of other differences."""
        assert self._greeting is not None, "it was made"
        for link in self.links:
            refusal = self._greeting.refusal(link.ready, self.work.setup)
            if refusal is not None:
                self._lose(link, refusal)
                return False
            for warning in self._greeting.warnings(link.name, link.ready):
                self.output.say(f"farandole: {warning}")
        return True

    # -- listening -------------------------------------------------------------------------------

    def _poll(self) -> None:
        events = self._selector.select(timeout=0.1)
        if self._pauses.look(time.monotonic()):
            self._reset_detectors(time.monotonic())
        for key, _ in events:
            if key.data is None:
                self._woken()
                continue
            link, is_stderr = key.data
            if not link.is_open:
                continue  # it was given up in this very batch of events
            if is_stderr:
                if not link.read_stderr():
                    self._selector.unregister(link.stderr)
            else:
                self._listen(link)
        for link in self.links:
            if link.is_open:
                link.channel.flush()
        self.output.tick()

    def _listen(self, link: HostLink) -> None:
        try:
            for kind, payload in link.channel.receive():
                if kind == OUTPUT:
                    rank, is_error, data = read_output(payload)
                    if rank not in link.unfinished:
                        raise FrameError(f"output of rank {rank}, which does not run there")
                    self.output.feed(rank, is_error, data)
                elif kind == FILE:
                    self._takers[link.name].take(payload)
                elif kind == MESSAGE:
                    self._hear(link, read_json(payload))
                if not link.is_open:
                    return
        except (FrameError, KeyError, TypeError, ValueError) as problem:
            self._lose(link, nonsense(problem))
            return
        if link.channel.ended:
            self._lose(link, self._why_hung_up(link, time.monotonic()))

    def _why_hung_up(self, link: HostLink, now: float) -> HostFailure:
        still = self._beats.pauses.recent_seconds(now)
        return why_hung_up(link, self.work.setup, now, stood_still_seconds=still)

    def _hear(self, link: HostLink, message: Message) -> None:
        kind, now = message["type"], time.monotonic()
        if kind == "ready":
            check_ready(message)
            link.ready, link.phase = message, "ready"
        elif kind == "route":
            link.route, link.phase = message, "routed"
        elif kind == "exit":
            rank, code = int(message["rank"]), int(message["code"])
            if rank not in link.unfinished:
                raise FrameError(f"the end of rank {rank}, which does not run there")
            link.unfinished.remove(rank)
            held = self.output.finish(rank, failed=code != 0)
            self._exits.append(Exit(rank, code, now, bool(message["stopped"]), held))
        elif kind == "crash":
            crash = unpack_crash(message["crash"])
            if crash.rank not in {place.rank for place in link.places}:
                raise FrameError(f"a crash of rank {crash.rank}, which does not run there")
            self._crashes.append(crash)
            crash.write(self.work.job.run_directory)
        elif kind == "say":
            self._say(f"host {link.name}: {str(message['text'])[:500]}")
        elif kind == "failed":
            self._lose(link, HostFailure(Trouble(str(message["why"]), str(message["remedy"]))))
        elif kind == "done":
            link.out_of_memory = bool(message["out_of_memory"])
            self._forget(link)
            link.close("done")

    def _lose(self, link: HostLink, ending: HostFailure) -> None:
        """Give a host up: its agent ends the ranks there."""
        if not link.is_open:
            return
        ranks = tuple(sorted(link.unfinished)) if link.phase == "running" else ()
        when = time.monotonic() if ending.when_seconds is None else ending.when_seconds
        self._losses.append(Loss(link, when, ending.trouble, ending.exit_code, ranks, ending.is_ours))
        for rank in ranks:
            self.output.finish(rank, failed=True)
        self._forget(link)
        link.close("gone")

    def _forget(self, link: HostLink) -> None:
        for descriptor in (link.channel.read_end, link.stderr):
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)

    # -- signs of life ---------------------------------------------------------------------------

    def _reset_detectors(self, now: float) -> None:
        """Called when this process was suspended: messages that came meanwhile are still unread."""
        for link in self.links:
            link.channel.patience.reset(now)

    def _watch(self, now: float) -> None:
        for link in self.links:
            if not link.is_open:
                continue
            if silent := why_silent(link, now):
                self._lose(link, silent)
            elif link.ready and self._give_up_at is not None and now > self._give_up_at and link.unfinished:
                self._lose(link, HostFailure(Trouble("its ranks did not stop in time")))

    # -- deciding --------------------------------------------------------------------------------

    def _decide(self, now: float) -> None:
        if self._signals:
            if self._give_up_at is None:
                self._give_up_at = (
                    self._deadlines[-1][0] + LEAVE_SECONDS if self._deadlines else now + LEAVE_SECONDS
                )
            return
        if self._failed_at is not None:
            if self._is_explained():
                self._stop_sooner(self._failed_at + SETTLE_SECONDS)
            return
        if self._losses or any(not crash.consequence for crash in self._crashes):
            self._fail(now)
        elif suspects := find_suspects(self._exits, self._crashes):
            late = any(link.is_open and link.silent_seconds(now) > SUSPECT_SECONDS for link in self.links)
            if not (suspects[0].is_consequence and late):
                self._fail(now)

    def _fail(self, now: float) -> None:
        self._failed_at = now
        # A host that was lost has no more to say, and what it took along can only fail.
        self._stop_after(now + (0.0 if self._losses else self._settle_seconds()))
        self._give_up_at = self._deadlines[-1][0] + LEAVE_SECONDS

    def _settle_seconds(self) -> float:
        """Return how long the other ranks get before they are stopped."""
        if not is_hang(self._exits, self._crashes):
            return SETTLE_SECONDS if self._is_explained() else UNEXPLAINED_SECONDS
        for link in self.links:
            if link.phase == "running":
                link.channel.send_message({"type": "stacks"})
        return STACKS_SECONDS

    def _is_explained(self) -> bool:
        """Return whether nothing more has to be waited for."""
        is_known = bool(self._losses) or is_explained(self._exits, self._crashes)
        return is_known and not is_hang(self._exits, self._crashes)

    def _signal_ranks(self, number: int) -> None:
        for link in self.links:
            if not link.is_open:
                continue
            if link.ready:
                link.channel.send_message({"type": "signal", "number": number})
            else:
                self._forget(link)
                link.close("gone")

    def _outcome(self, ended: float, begin: float) -> Outcome:
        if self._signals:
            return Outcome(128 + self._signals[0], ended - begin, signal=self._signals[0])
        stop_seconds = ended - (ended if self._failed_at is None else self._failed_at)
        failure = find_cause(self._exits, self._crashes, self._losses, self.links, stop_seconds)
        return Outcome(0 if failure is None else failure.exit_code, ended - begin, failure=failure)
