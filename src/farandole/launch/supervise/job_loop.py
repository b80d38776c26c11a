"""The loop of a job, whatever it starts: one thread, one selector, the signals to its launcher, and its stop.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from ...core.vocabulary.run_files import Crash
from ..job.contract import JobSpec
from ..output import Output
from .failure import Exit, Failure, is_explained, is_hang
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


class JobLoop:
    """A job from its start to its end. Subclasses say what is started and what is decided. Use once."""

    def __init__(self, output: Output, job: JobSpec, status: Callable[[], str | None] = lambda: None) -> None:
        """`status` returns the latest line of progress, None when there is none."""
        self.output, self._job, self._status = output, job, status
        self._selector = selectors.DefaultSelector()
        """The data of each key is called when its file is readable."""
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
            self._begin(at_end)
            while self._goes_on():
                self._poll()
                now = time.monotonic()
                self._decide(now)
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

    def _begin(self, at_end: ExitStack) -> None:
        """Start what is there from the beginning; `at_end` gets what must not stay."""
        raise NotImplementedError

    def _goes_on(self) -> bool:
        raise NotImplementedError

    def _decide(self, now: float) -> None:
        """Do what is due at each turn of the loop."""
        raise NotImplementedError

    def _signal_ranks(self, number: int) -> None:
        raise NotImplementedError

    def _before_signals(self) -> None:
        """Do what is to be done before a signal to the launcher reaches the ranks."""

    def _outcome(self, seconds: float) -> Outcome:
        """Return how the job ended when no signal ended it."""
        raise NotImplementedError

    # -- the loop --------------------------------------------------------------------------------

    def _poll(self) -> None:
        for key, _ in self._selector.select(_TURN_SECONDS):
            key.data()
        self.output.tick()

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
            self._signal_ranks(signal.SIGUSR1)
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number = self._deadlines.pop(0)
            self._stopping = True
            if number == signal.SIGKILL:
                self._killed_at = now
            self._signal_ranks(number)

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
    """Decides when the ranks are stopped. Subclasses start them, and know how they ended."""

    def __init__(self, output: Output, job: JobSpec, status: Callable[[], str | None] = lambda: None) -> None:
        """`status` returns the latest line of progress, None when there is none."""
        super().__init__(output, job, status)
        self._exits: list[Exit] = []
        self._missed: set[int] = set()
        """Ranks that were killed, and without which the others go on."""
        self._failed_at: float | None = None

    # -- what subclasses do ----------------------------------------------------------------------

    def _crashes(self) -> Sequence[Crash]:
        """Return the accounts of crashes so far."""
        raise NotImplementedError

    def _take_stacks(self) -> None:
        """Have the ranks' stacks taken, where that is possible: the job hangs."""

    def _has_failed(self, now: float) -> bool:
        return any(ended.failed for ended in self._judged())

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

    def _find_failure(self, stop_seconds: float) -> Failure | None:
        """Return the first cause of a failure; None when nothing failed."""
        raise NotImplementedError

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

    def _settle_seconds(self) -> float:
        """Return how long the other ranks get before they are stopped."""
        if is_hang(self._judged(), self._crashes()):
            self._take_stacks()
            return STACKS_SECONDS
        return SETTLE_SECONDS if self._is_explained() else UNEXPLAINED_SECONDS

    def _is_explained(self) -> bool:
        """Return whether nothing more has to be waited for."""
        crashes = self._crashes()
        judged = self._judged()
        return is_explained(judged, crashes) and not is_hang(judged, crashes)

    def _outcome(self, seconds: float) -> Outcome:
        failure = self._find_failure(0.0 if self._failed_at is None else time.monotonic() - self._failed_at)
        return Outcome(0 if failure is None else failure.exit_code, seconds, failure)
