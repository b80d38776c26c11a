"""The loop of a job, whatever it starts: one thread, one selector, the signals to its launcher, and its stop.

What a host is, and how it is reached, is the host's own affair (`JobHost`): this machine, one over ssh, actors
of Ray. When the job stops is decided by `FixedJob`, or by `ElasticJob`, whose ranks come and go.

[Note: how a job ends] All ranks ended well: exit code 0. One failed: a moment for the others' own
accounts, then SIGTERM and SIGKILL half a second later; exit code of the first cause. SIGINT to the launcher is
passed on, with time to end well, then SIGTERM, then SIGKILL. SIGTERM, or the loss of its terminal, is SIGTERM to
the ranks: those that listen save and end, in the time of ``--grace``, then SIGKILL. Another signal kills at once;
but a second of these within some seconds is the same, by another way. Exit code 128 + signal. SIGUSR1 is passed
on and ends nothing. However a job ends, every process group is gone and the port is free.
"""

from __future__ import annotations

import math
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from ...core.framing import FrameError
from ...core.vocabulary.run_files import Crash
from ..job.contract import JobSpec
from ..output import Output
from .failure import Exit, Failure, HostFailure, Loss, find_cause, find_suspects, is_explained, is_hang
from .stacks import STACKS_SECONDS

if TYPE_CHECKING:
    from ...core.failures import Position

TERMINATE_SECONDS = 0.5
"""From SIGTERM to SIGKILL."""
ANNOUNCE_SECONDS = 1.0
"""After a signal: ranks that still run then are worth a word. Most have ended."""
INTERRUPT_SECONDS = 3.0
"""From a passed-on signal to SIGTERM."""
SAME_SECONDS = 5.0
"""SIGTERM or SIGHUP within this time after the first is the same: launcher and ranks are signalled, or twice."""
LEAVE_SECONDS = 2.0
"""After SIGKILL, for a host to say that its ranks are gone."""
_TURN_SECONDS = 0.1
_STATUS_SECONDS = 1.0
_PLAIN_STATUS_SECONDS = 10.0
"""Where lines of progress stay: not on a terminal."""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals by which a user, a scheduler or a terminal ends a job."""


@contextmanager
def handling(numbers: Iterable[int], handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Call `handler` for these signals inside the ``with``; a SIGHUP that is ignored (nohup) stays so."""
    wanted = [n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, handler) for number in wanted}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


@dataclass
class Outcome:
    """How the job ended."""

    exit_code: int
    seconds: float
    """From the first start to the last end."""
    failure: Failure | None = None
    signal: int | None = None
    positions: tuple[Position, ...] = ()
    """Where ranks stood that did no steps, when the launcher was signalled."""
    has_met: bool | None = None
    """Whether ranks met at the job's address and port; None: not known."""


class Reports(Protocol):
    """Takes what ranks do, or the workers of an elastic job: either goes by its number."""

    def printed(self, number: int, is_error: bool, data: bytes) -> None:
        """Take what one has printed."""

    def crashed(self, crash: Crash) -> None:
        """Take the account that one has left of its crash: before its end, as a rule long before."""

    def ended(self, exited: Exit) -> None:
        """The process of one is gone."""

    def heard(self, number: int, frame: dict[str, Any]) -> None:
        """A worker has sent a frame; raise `FrameError` where there are none."""

    def say(self, text: str) -> None:
        """Tell the person who watches."""


class HostReports(Reports, Protocol):
    """Takes what happens on hosts: the job."""

    def stood(self, positions: Iterable[Position]) -> None:
        """Take where ranks stood that did no steps, when they were told to end."""

    def lost(self, host: JobHost, failure: HostFailure) -> None:
        """A host is gone with all that ran there, or cannot be reached."""


class JobHost(Protocol):
    """One host, or several that are reached as one. It never waits, and never raises for what happens elsewhere.

    What cannot be started has ended, and a host that cannot be reached, or not any more, is lost.
    """

    def fileno(self) -> int:
        """Return a descriptor that is readable when `poll` has something to do."""

    def poll(self) -> None:
        """Deal with what has come."""

    def tick(self, now: float) -> None:
        """Do what is due; called about ten times a second."""

    def stop(self, number: int) -> None:
        """Send a signal to all that runs there; but for SIGUSR1, a warning, it ends because of us from now on."""

    def take_stacks(self) -> None:
        """Have the stacks of all ranks there written into the run directory, where that is possible."""

    def leave(self) -> bool:
        """Nothing runs there and nothing will; return whether the host has been let go.

        To be called again until it has: files may be on their way.
        """

    def close(self) -> None:
        """Let go at once; kill what runs."""


class HostTable:
    """The hosts that are in the job, and which of its ranks or workers runs where."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self.names: dict[JobHost, set[str]] = {}
        """The names that each goes by."""
        self.where: dict[int, JobHost] = {}
        """What has not ended is here."""
        self._selector = selector

    def add(self, host: JobHost, name: str = "", numbers: Iterable[int] = ()) -> None:
        """Let a host in, under one more name, with what runs there."""
        if host not in self.names:
            self.names[host] = set()
            self._selector.register(host, selectors.EVENT_READ, partial(self._poll, host))
        self.names[host].add(name)
        self.where |= dict.fromkeys(numbers, host)

    def _poll(self, host: JobHost) -> None:
        if host in self.names:  # else it was lost in this very batch of events
            host.poll()

    def tick(self, now: float) -> None:
        """Let each host do what is due."""
        for host in list(self.names):
            host.tick(now)

    def stop(self, number: int) -> None:
        """Send a signal to all that runs."""
        for host in list(self.names):
            host.stop(number)

    def forget(self, host: JobHost) -> tuple[set[str], list[int]]:
        """Close a host; return its names, and what still ran there."""
        running = [number for number, where in self.where.items() if where is host]
        for number in running:
            del self.where[number]
        self._selector.unregister(host)
        host.close()
        return self.names.pop(host), running

    def close(self) -> None:
        """Close all."""
        for host in list(self.names):
            self.forget(host)


class JobLoop:
    """A job from its start to its end: takes what hosts report. Subclasses start, and decide. Use once."""

    def __init__(self, output: Output, job: JobSpec, status: Callable[[], str | None] = lambda: None) -> None:
        """`status` returns the latest line of progress, None when there is none."""
        self.output, self._job, self._status = output, job, status
        self._selector = selectors.DefaultSelector()
        """The data of each key is called when its file is readable."""
        self.hosts = HostTable(self._selector)
        self._crashes: dict[int, Crash] = {}
        self._signals: list[int] = []
        self._first_signal_seconds = 0.0
        self._stopping = False
        self._deadlines: list[tuple[float, int]] = []
        """When to send which signal to all that still run."""
        self._warnings = 0
        """Signals that warn of the end and were not passed on yet."""
        self._announce_at: float | None = None
        """When to say that the ranks were signalled."""
        self._killed_at: float | None = None
        self._is_prepared = False
        """Whether `_before_signals` was called."""
        self._positions: dict[int, Position] = {}
        """Where ranks stood that did no steps, when this launcher was signalled."""

    def run(self) -> Outcome:
        """Start all, and return when all is gone."""
        begin = time.monotonic()
        next_status = begin + _STATUS_SECONDS
        with ExitStack() as at_end:
            at_end.callback(self.output.status, None)
            at_end.enter_context(self._catching_signals())
            at_end.callback(self._selector.close)
            at_last = at_end.enter_context(ExitStack())
            at_end.callback(self.hosts.close)
            self._begin(at_last)
            while self._goes_on():
                for key, _ in self._selector.select(_TURN_SECONDS):
                    key.data()
                self.output.tick()
                now = time.monotonic()
                self.hosts.tick(now)
                self._decide(now)
                self._let_go(now)
                self._send_due(now)
                if now >= next_status:
                    next_status = now + self._show_status()
        seconds = time.monotonic() - begin
        if self._signals:
            positions = tuple(self._positions[rank] for rank in sorted(self._positions))
            return Outcome(128 + self._signals[0], seconds, signal=self._signals[0], positions=positions)
        return self._outcome(seconds)

    def say(self, text: str) -> None:
        """Tell the person who watches."""
        self.output.say(f"farandole: {text}")

    # -- what subclasses do ----------------------------------------------------------------------

    def _begin(self, at_last: ExitStack) -> None:
        """Start what is there from the beginning; `at_last` gets what hosts need as long as they are there."""
        raise NotImplementedError

    def _decide(self, now: float) -> None:
        """Do what is due at each turn of the loop."""
        raise NotImplementedError

    @property
    def _is_ending(self) -> bool:
        """Whether nothing is begun any more."""
        raise NotImplementedError

    def _needs(self, names: set[str]) -> bool:
        """Return whether a host of these names is kept although nothing runs there, before the job ends."""
        return False

    def _has_ended(self, exited: Exit) -> None:
        raise NotImplementedError

    def _has_lost(self, names: set[str], running: list[int], failure: HostFailure) -> None:
        """A host is gone, with those that ran there."""
        raise NotImplementedError

    def _before_signals(self) -> None:
        """Do what is to be done before a signal to the launcher reaches the ranks."""

    def _outcome(self, seconds: float) -> Outcome:
        """Return how the job ended when no signal ended it."""
        raise NotImplementedError

    # -- reports of hosts ------------------------------------------------------------------------

    def printed(self, number: int, is_error: bool, data: bytes) -> None:
        """Show what one has printed."""
        self.output.feed(number, is_error, data)

    def crashed(self, crash: Crash) -> None:
        """Keep an account."""
        self._crashes[crash.rank] = crash

    def heard(self, number: int, frame: dict[str, Any]) -> None:
        """Refuse a frame: ranks send none."""
        raise FrameError(f"a frame of rank {number}, which has no channel")

    def stood(self, positions: Iterable[Position]) -> None:
        """Keep where ranks stood."""
        self._positions |= {position.rank: position for position in positions}

    def ended(self, exited: Exit) -> None:
        """The process of a rank or worker is gone."""
        del self.hosts.where[exited.rank]
        held = self.output.finish(exited.rank, failed=exited.code != 0)
        self._has_ended(replace(exited, held=exited.held or held))

    def lost(self, host: JobHost, failure: HostFailure) -> None:
        """A host is gone with all that ran there, or cannot be reached."""
        if host not in self.hosts.names:
            return
        names, running = self.hosts.forget(host)
        for number in running:
            self.output.finish(number, failed=True)
        self._has_lost(names, running, failure)

    # -- the loop --------------------------------------------------------------------------------

    def _goes_on(self) -> bool:
        if not self._is_ending or self.hosts.where:
            return True
        return bool(self.hosts.names) and len(self._signals) < 2  # who asks twice does not wait for files

    def _let_go(self, now: float) -> None:
        """Take leave of hosts that are no longer needed, and of those that do not even end what was killed."""
        busy = set(self.hosts.where.values())
        for host, names in list(self.hosts.names.items()):
            if host in busy:
                if self._is_late(now):
                    self.lost(host, HostFailure("its ranks did not stop in time"))
            elif (self._is_ending or not self._needs(names)) and host.leave():
                self.hosts.forget(host)

    def _show_status(self) -> float:
        """Show a new line of progress; return the seconds until the next. The first one comes early."""
        text = None if self._stopping else self._status()
        if text is None:
            return _STATUS_SECONDS
        self.output.status(text)
        return _STATUS_SECONDS if self.output.is_live else _PLAIN_STATUS_SECONDS

    # -- stopping --------------------------------------------------------------------------------

    def _stop_after(self, when: float) -> None:
        """Stop all ranks at `when`: a rank has failed."""
        self._deadlines = [(when, signal.SIGTERM), (when + TERMINATE_SECONDS, signal.SIGKILL)]

    def _stop_sooner(self, when: float) -> None:
        """Stop them at `when` if that was to be later, and has not begun."""
        if self._deadlines and not self._stopping and when < self._deadlines[0][0]:
            self._stop_after(when)

    def _is_late(self, now: float) -> bool:
        """Return whether even what was killed has had its time to end."""
        return self._killed_at is not None and now - self._killed_at > LEAVE_SECONDS

    def _send_due(self, now: float) -> None:
        if self._signals and not self._is_prepared:
            self._is_prepared = True
            self.output.hide_tracebacks()
            self._before_signals()
        if self._announce_at is not None and now >= self._announce_at:
            self._announce_at = None
            name = signal.Signals(self._signals[0]).name
            again = "once more" if self._signals[0] == signal.SIGINT else "Ctrl-C"
            self.say(
                f"{name}: waiting for the ranks to end, at most {self._end_seconds:g} s; {again} ends them at once"
            )
        for _ in range(self._warnings):
            self._warnings -= 1
            self.hosts.stop(signal.SIGUSR1)
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number = self._deadlines.pop(0)
            self._stopping = True
            if number == signal.SIGKILL:
                self._killed_at = now
            self.hosts.stop(number)

    @contextmanager
    def _catching_signals(self) -> Iterator[None]:
        read_end, wake_end = socket.socketpair()

        def woken() -> None:
            with suppress(BlockingIOError):
                read_end.recv(4096)  # its handler has noted the signal

        with read_end, wake_end:
            read_end.setblocking(False)
            wake_end.setblocking(False)
            self._selector.register(read_end, selectors.EVENT_READ, woken)
            before = signal.set_wakeup_fd(wake_end.fileno())
            try:
                with handling(ENDING, self._signalled), handling((signal.SIGUSR1,), self._warned):
                    yield
            finally:
                signal.set_wakeup_fd(before)

    def _warned(self, number: int, _: FrameType | None) -> None:
        self._warnings += 1

    @property
    def _end_seconds(self) -> float:
        """How long the ranks have to end after the signal."""
        is_interrupt = self._signals[0] == signal.SIGINT
        return INTERRUPT_SECONDS + TERMINATE_SECONDS if is_interrupt else self._job.grace_seconds

    def _signalled(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        is_soon = now - self._first_signal_seconds < SAME_SECONDS
        if is_soon and self._signals and signal.SIGINT not in (number, self._signals[0]):
            return
        self._signals.append(number)
        self._stopping = True
        if len(self._signals) > 1:
            self._deadlines = [(now, signal.SIGKILL)]
            return
        is_due = self._deadlines[-1][0] if self._deadlines else math.inf  # the end of a job that has failed
        self._first_signal_seconds = now
        self._announce_at = now + ANNOUNCE_SECONDS
        if number == signal.SIGINT:
            self._deadlines = [(now, number), (now + INTERRUPT_SECONDS, signal.SIGTERM)]
        else:
            self._deadlines = [(now, signal.SIGTERM)]
        self._deadlines.append((min(now + self._end_seconds, is_due), signal.SIGKILL))


# A job of fixed ranks, wherever they run: all are stopped when one fails, once the first cause is known.


SETTLE_SECONDS = 0.15
"""After the first failure: the accounts of ranks that failed for the same reason arrive."""
UNEXPLAINED_SECONDS = 1.0
"""The same as long as no rank has said more than that another is gone: that one may take its time to end."""


class FixedJob(JobLoop):
    """Decides when the ranks are stopped, and names the cause. Subclasses start them."""

    def __init__(self, output: Output, job: JobSpec, status: Callable[[], str | None] = lambda: None) -> None:
        """`status` returns the latest line of progress, None when there is none."""
        super().__init__(output, job, status)
        self._exits: list[Exit] = []
        self._losses: list[Loss] = []
        self._missed: set[int] = set()
        """Ranks that were killed, and without which the others go on."""
        self._failed_at: float | None = None

    def _has_ended(self, exited: Exit) -> None:
        self._exits.append(exited)

    def _has_lost(self, names: set[str], running: list[int], failure: HostFailure) -> None:
        if not running and self._exits and not any(each.code for each in self._exits):
            listed = ", ".join(sorted(names))
            self.say(f"warning: {failure.cause} on {listed}, whose ranks had ended well: its files may be missing")
            return
        when = time.monotonic() if failure.when_seconds is None else failure.when_seconds
        self._losses += [Loss(name, when, failure, tuple(sorted(running))) for name in sorted(names)]

    @property
    def _is_ending(self) -> bool:
        return bool(self._signals) or self._failed_at is not None or not self.hosts.names

    # -- deciding --------------------------------------------------------------------------------

    def _decide(self, now: float) -> None:
        if self._signals:
            return
        if self._failed_at is not None:
            if self._is_explained():
                self._stop_sooner(self._failed_at + SETTLE_SECONDS)
        elif self._has_failed(now):
            self._failed_at = now
            self.output.hide_tracebacks()  # the report has that of the cause
            self._stop_after(now + self._settle_seconds())

    def _has_failed(self, now: float) -> bool:
        if self._losses or any(not crash.consequence for crash in self._crashes.values()):
            return True
        suspects = find_suspects(self._judged(), self._accounts())
        return bool(suspects) and not (suspects[0].is_consequence and self._may_be_a_host(now))

    def _may_be_a_host(self, now: float) -> bool:
        """Return whether a host is suspiciously silent. See [Note: cause across hosts]."""
        return False

    def _judged(self) -> list[Exit]:
        """Return the ends of ranks but those that the job goes on without."""
        if self._job.outlives_ranks and self._failed_at is None and not self._stopping:
            for ended in self._exits:
                may_miss = ended.rank > 0 and not ended.is_missed and ended.rank not in self._missed
                if ended.failed and ended.code < 0 and may_miss:
                    self._missed.add(ended.rank)
                    name = signal.Signals(-ended.code).name
                    self.say(f"rank {ended.rank} was killed by {name}: the others go on without it")
        return [ended for ended in self._exits if ended.rank not in self._missed]

    def _accounts(self) -> list[Crash]:
        return list(self._crashes.values())

    def _settle_seconds(self) -> float:
        """Return how long the other ranks get before they are stopped."""
        if self._losses:
            return 0.0  # a host that was lost has no more to say, and what it took along can only fail
        if is_hang(self._judged(), self._accounts()):
            for host in self.hosts.names:
                host.take_stacks()
            return STACKS_SECONDS
        return SETTLE_SECONDS if self._is_explained() else UNEXPLAINED_SECONDS

    def _is_explained(self) -> bool:
        """Return whether nothing more has to be waited for."""
        judged, accounts = self._judged(), self._accounts()
        return (bool(self._losses) or is_explained(judged, accounts)) and not is_hang(judged, accounts)

    def _outcome(self, seconds: float) -> Outcome:
        stop_seconds = 0.0 if self._failed_at is None else time.monotonic() - self._failed_at
        failure = find_cause(self._judged(), self._accounts(), self._losses, stop_seconds)
        return Outcome(0 if failure is None else failure.exit_code, seconds, failure)
