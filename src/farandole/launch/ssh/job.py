"""A job on many hosts: connects to all, lets them agree where to meet, starts the ranks, and decides how it ends.

[Note: cause across hosts] A host that is lost makes the ranks of other hosts fail, within milliseconds or
much later, and the news of its loss comes last. So an exception that only tells of another rank is not
believed while a host is suspiciously silent; and a loss counts from the moment the host fell silent.
"""

from __future__ import annotations

import os
import secrets
import selectors
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import farandole

from ...core.errors import ConfigError, LaunchError
from ...core.run_files import PLAN, Crash
from ..contract import Job
from ..failure import Exit, Failure, find_failure, find_suspects, is_hang
from ..local import PLAIN_STATUS_SECONDS, STATUS_SECONDS, Outcome
from ..output import Output
from ..stacks import STACKS_SECONDS
from ..stopping import SETTLE_SECONDS, Stoppable
from .files import FileTaker
from .frames import BEAT, FILE, MESSAGE, OUTPUT, BadFrame, Message, read_message, read_output
from .host_link import HostLink
from .protocol import (
    BEAT_SECONDS,
    LEAVE_SECONDS,
    START_SECONDS,
    SUSPECT_SECONDS,
    TOKEN_FILE,
    pack_job,
    pack_places,
)
from .remote_shell import HostSetup, Trouble, explain, explain_loss
from .versions import differences, own_versions


@dataclass(frozen=True)
class RemoteWork:
    """What every host is asked to run."""

    command: Sequence[str]
    job: Job
    """Its address and port are found while the job starts."""
    setup: HostSetup
    environment: Mapping[str, str]
    """What every rank gets beside its host's own environment."""
    bind: bool = True


@dataclass(frozen=True)
class Loss:
    """A host that failed as a whole."""

    link: HostLink
    when_seconds: float
    trouble: Trouble
    exit_code: int = 1
    ranks: tuple[int, ...] = ()
    """Those that were running there."""


@dataclass(eq=False)
class RemoteJob(Stoppable):
    """Runs one command as the ranks of many hosts. Use once."""

    links: Sequence[HostLink]
    work: RemoteWork
    output: Output
    status: Callable[[], str | None] = lambda: None
    _exits: list[Exit] = field(init=False, default_factory=list)
    _crashes: list[Crash] = field(init=False, default_factory=list)
    _losses: list[Loss] = field(init=False, default_factory=list)
    _takers: dict[str, FileTaker] = field(init=False, default_factory=dict)
    _failed_at: float | None = field(init=False, default=None)
    _give_up_at: float | None = field(init=False, default=None)

    def run(self) -> Outcome:
        """Start all ranks and return when all are gone, and all files here.

        Raises `LaunchError` when the run directory cannot be written.
        """
        begin = looked = time.monotonic()
        next_status = begin + STATUS_SECONDS
        previous = self._catch_signals()
        token = self.work.job.run_directory / TOKEN_FILE
        try:
            self._connect(token)
            with self._beating():
                while any(link.is_open for link in self.links):
                    self._poll()
                    now = time.monotonic()
                    if now - looked > 1.0:
                        self._forgive_silence(now)
                    looked = now
                    self._advance()
                    self._watch(now, begin)
                    self._decide(now)
                    self._send_due(now)
                    if now >= next_status:
                        next_status = now + self._show_status()
        except OSError as problem:
            raise LaunchError(
                f"cannot write {self.work.job.run_directory}: {problem}",
                remedy="make room, or choose another place with --run-dir",
            ) from None
        finally:
            token.unlink(missing_ok=True)
            for link in self.links:
                if link.is_open and hasattr(link, "process"):
                    link.close("gone")
            self._selector.close()
            self._release_signals(previous)
            self.output.status(None)
        return self._outcome(time.monotonic(), begin)

    # -- starting --------------------------------------------------------------------------------

    def _connect(self, token: Path) -> None:
        secret = secrets.token_hex(16)
        descriptor = os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secret)
        hello: Message = {
            "type": "hello",
            "run_directory": str(self.work.job.run_directory),
            "token": secret,
            "python_path": self.work.environment.get("PYTHONPATH", ""),
        }
        paths = [str(Path(farandole.__file__).parents[1])]
        for link in self.links:
            link.open(self.work.setup, paths, hello)
            self._takers[link.name] = FileTaker(self.work.job.run_directory, link.name)
            self._selector.register(link.channel.read_end, selectors.EVENT_READ, (link, False))
            self._selector.register(link.stderr, selectors.EVENT_READ, (link, True))

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
            plan = (job.run_directory / PLAN).read_text(encoding="utf-8")
            for link in self.links:
                message = {
                    "type": "start", "command": list(self.work.command), "places": pack_places(link.places),
                    "job": pack_job(job), "environment": dict(self.work.environment), "bind": self.work.bind,
                    "plan": plan, "plan_given": job.plan_file is not None,
                }  # fmt: skip
                link.channel.send_message(message)
                link.phase = "running"

    def _are_alike(self) -> bool:
        """Refuse hosts with another farandole; warn of other differences."""
        here = own_versions(self.work.environment.get("PYTHONPATH", ""))
        for link in self.links:
            there = link.ready["versions"]
            if there["farandole"] != here["farandole"]:
                mine, theirs, python = here["farandole"], there["farandole"], self.work.setup.python
                trouble = Trouble(
                    f"it has farandole {theirs}, this host has {mine}",
                    f"install the same there: {python} -m pip install farandole=={mine}",
                )
                self._lose(link, trouble, exit_code=ConfigError.exit_code)
                return False
            for difference in differences(here, there):
                self.output.say(f"farandole: warning: host {link.name}: {difference}")
        return True

    # -- listening -------------------------------------------------------------------------------

    def _poll(self) -> None:
        for key, _ in self._selector.select(timeout=0.1):
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
                        raise BadFrame(f"output of rank {rank}, which does not run there")
                    self.output.feed(rank, is_error, data)
                elif kind == FILE:
                    self._takers[link.name].take(payload)
                elif kind == MESSAGE:
                    self._hear(link, read_message(payload))
                if not link.is_open:
                    return
        except (BadFrame, KeyError, TypeError, ValueError) as problem:
            self._lose(link, Trouble(f"what it says makes no sense: {problem}", "is it the same farandole?"))
            return
        if link.channel.ended:
            self._hung_up(link)

    def _hear(self, link: HostLink, message: Message) -> None:
        kind, now = message["type"], time.monotonic()
        if kind == "ready":
            _check_ready(message)
            link.ready, link.phase = message, "ready"
        elif kind == "route":
            link.route, link.phase = message, "routed"
        elif kind == "exit":
            rank, code = int(message["rank"]), int(message["code"])
            if rank not in link.unfinished:
                raise BadFrame(f"the end of rank {rank}, which does not run there")
            link.unfinished.remove(rank)
            held = self.output.finish(rank, failed=code != 0)
            self._exits.append(Exit(rank, code, now, bool(message["stopped"]), held))
        elif kind == "crash":
            values = {each.name: message["crash"][each.name] for each in fields(Crash)}
            crash = Crash(**{**values, "when_seconds": now - float(values["when_seconds"])})
            if crash.rank not in {place.rank for place in link.places}:
                raise BadFrame(f"a crash of rank {crash.rank}, which does not run there")
            self._crashes.append(crash)
            crash.write(self.work.job.run_directory)
        elif kind == "failed":
            self._lose(link, Trouble(str(message["why"]), str(message["remedy"])))
        elif kind == "done":
            link.out_of_memory = bool(message["out_of_memory"])
            self._forget(link)
            link.close("done")

    def _hung_up(self, link: HostLink) -> None:
        """The pipe has ended before the host said that it was done."""
        code = link.wait(0.3)
        link.read_stderr()
        said = link.said.decode(errors="replace")
        if not link.ready:
            self._lose(link, explain(link.name, code, said, self.work.setup), exit_code=ConfigError.exit_code)
        elif link.silent_seconds(time.monotonic()) > SUSPECT_SECONDS:
            # It was silent before: its own reaper was a little faster than we are.
            self._lose(link, _silent(link), when=link.channel.patience.last_heard)
        else:
            self._lose(link, explain_loss(code, said))

    def _lose(self, link: HostLink, trouble: Trouble, *, exit_code: int = 1, when: float | None = None) -> None:
        """Give a host up: its agent ends the ranks there."""
        if not link.is_open:
            return
        ranks = tuple(sorted(link.unfinished)) if link.phase == "running" else ()
        self._losses.append(Loss(link, time.monotonic() if when is None else when, trouble, exit_code, ranks))
        for rank in ranks:
            self.output.finish(rank, failed=True)
        self._forget(link)
        link.close("gone")

    def _forget(self, link: HostLink) -> None:
        for descriptor in (link.channel.read_end, link.stderr):
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)

    # -- signs of life ---------------------------------------------------------------------------

    @contextmanager
    def _beating(self) -> Iterator[None]:
        """Send beats from a thread: this one may be held up by a console that nobody reads."""
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(BEAT_SECONDS):
                for link in self.links:
                    if link.is_open and link.channel.waiting_bytes == 0:
                        link.channel.send(BEAT)

        thread = threading.Thread(target=beat, name="farandole-beats", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _forgive_silence(self, now: float) -> None:
        """It was us who slept: what came meanwhile is still unread."""
        for link in self.links:
            link.channel.patience.forgive(now)

    def _watch(self, now: float, begin: float) -> None:
        for link in self.links:
            if not link.is_open:
                continue
            if not link.ready:
                if now - begin > START_SECONDS:
                    cause = f"it did not answer within {START_SECONDS:g} s"
                    self._lose(link, Trouble(cause, f"try by hand: ssh {link.name} true"))
            elif link.channel.patience.is_over(now):
                self._lose(link, _silent(link), when=link.channel.patience.last_heard)
            elif self._give_up_at is not None and now > self._give_up_at and link.unfinished:
                self._lose(link, Trouble("its ranks did not stop in time"))

    # -- deciding --------------------------------------------------------------------------------

    def _decide(self, now: float) -> None:
        if self._signals:
            if self._give_up_at is None:
                self._give_up_at = (
                    self._deadlines[-1][0] + LEAVE_SECONDS if self._deadlines else now + LEAVE_SECONDS
                )
            return
        if self._failed_at is not None:
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
            return SETTLE_SECONDS
        for link in self.links:
            if link.phase == "running":
                link.channel.send_message({"type": "stacks"})
        return STACKS_SECONDS

    def _signal_ranks(self, number: int) -> None:
        for link in self.links:
            if not link.is_open:
                continue
            if link.ready:
                link.channel.send_message({"type": "signal", "number": number})
            else:
                self._forget(link)
                link.close("gone")

    def _show_status(self) -> float:
        text = None if self._stopping else self.status()
        if text is not None:
            self.output.status(text)
        return STATUS_SECONDS if self.output.is_live else PLAIN_STATUS_SECONDS

    def _outcome(self, ended: float, begin: float) -> Outcome:
        if self._signals:
            return Outcome(128 + self._signals[0], ended - begin, signal=self._signals[0])
        suspects = find_suspects(self._exits, self._crashes)
        if not suspects and not self._losses:
            return Outcome(0, ended - begin)
        stop_seconds = ended - (ended if self._failed_at is None else self._failed_at)
        losses = sorted(self._losses, key=lambda loss: loss.when_seconds)
        if losses and (not suspects or (0, losses[0].when_seconds) < suspects[0].order):
            failure = self._failure_of(losses[0], stop_seconds)
        else:
            failure = self._failure_of_rank(stop_seconds)
        return Outcome(failure.exit_code, ended - begin, failure=failure)

    def _failure_of_rank(self, stop_seconds: float) -> Failure:
        failure = find_failure(
            self._exits, self._crashes, host="", stop_seconds=stop_seconds,
            out_of_memory=any(link.out_of_memory for link in self.links),
        )  # fmt: skip
        host = next(link.name for link in self.links if failure.rank in {place.rank for place in link.places})
        return replace(failure, host=host)

    def _failure_of(self, loss: Loss, stop_seconds: float) -> Failure:
        also = tuple(suspect.exit.rank for suspect in find_suspects(self._exits, self._crashes))
        stopped = {ended.rank for ended in self._exits if ended.code != 0} - set(also)
        running = f" (ranks {', '.join(map(str, loss.ranks))} ran there)" if loss.ranks else ""
        return Failure(
            rank=None, host=loss.link.name, step=None, cause=f"{loss.trouble.cause}{running}", traceback="",
            exit_code=loss.exit_code, also_failed=tuple(sorted(also)), stopped=tuple(sorted(stopped)),
            stop_seconds=stop_seconds, remedy=loss.trouble.remedy,
        )  # fmt: skip


def _silent(link: HostLink) -> Trouble:
    seconds = link.channel.patience.limit_seconds
    return Trouble(
        f"no sign of life for {seconds:.0f} s: frozen, switched off, or its link is cut",
        "look at its power, its cable and its load",
    )


def _check_ready(message: Message) -> None:
    versions = message["versions"]
    if not isinstance(versions, dict) or not all(isinstance(text, str) for text in versions.values()):
        raise BadFrame(f"versions {versions!r}: expected texts")
    if not isinstance(message["address"], str) or "farandole" not in versions:
        raise BadFrame("a greeting without an address or a version")
