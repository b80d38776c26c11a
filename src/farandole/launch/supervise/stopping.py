"""When a job's ranks are told to stop, and by which signal: after a failure, or when the launcher is signalled.

[Note: how a job ends] All ranks ended well: exit code 0. One failed: a moment for the others' own
accounts, then SIGTERM to their groups and SIGKILL half a second later; exit code of the first cause. A
signal to the launcher is passed on, with time to end well, then SIGTERM, then SIGKILL; a second one
kills at once; exit code 128 + signal. However it ends, every process group is gone and the port is free.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

SETTLE_SECONDS = 0.15
"""After the first failure: the accounts of ranks that failed for the same reason arrive."""
UNEXPLAINED_SECONDS = 1.0
"""The same as long as no rank has said more than that another is gone: that one may take its time to end."""
TERMINATE_SECONDS = 0.5
"""From SIGTERM to SIGKILL."""
ANNOUNCE_SECONDS = 0.3
"""After a signal: ranks that still run then are worth a word. Most have ended."""
INTERRUPT_SECONDS = 3.0
"""From a passed-on signal to SIGTERM."""
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(eq=False)
class SignalHandling:
    """A job with a selector loop. Subclasses say how a signal reaches the ranks."""

    _selector: selectors.BaseSelector = field(init=False, default_factory=selectors.DefaultSelector)
    _signals: list[int] = field(init=False, default_factory=list)
    _stopping: bool = field(init=False, default=False)
    _deadlines: list[tuple[float, int]] = field(init=False, default_factory=list)
    """When to send which signal to all that still run."""

    _announce_at: float | None = field(init=False, default=None)
    """When to say that the ranks were signalled."""

    def _signal_ranks(self, number: int) -> None:
        raise NotImplementedError

    def _say(self, text: str) -> None:
        raise NotImplementedError

    def _stop_after(self, when: float) -> None:
        """Stop all ranks at `when`: a rank has failed."""
        self._deadlines = [(when, signal.SIGTERM), (when + TERMINATE_SECONDS, signal.SIGKILL)]

    def _stop_sooner(self, when: float) -> None:
        """Stop them at `when` if that was to be later, and has not begun."""
        if self._deadlines and not self._stopping and when < self._deadlines[0][0]:
            self._stop_after(when)

    def _send_due(self, now: float) -> None:
        if self._announce_at is not None and now >= self._announce_at:
            self._announce_at = None
            name = signal.Signals(self._signals[0]).name
            self._say(
                f"{name}: waiting for the ranks to end, at most {INTERRUPT_SECONDS + TERMINATE_SECONDS:g} s; once "
                "more ends them at once"
            )
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number = self._deadlines.pop(0)
            self._stopping = True
            self._signal_ranks(number)

    def _catch_signals(self) -> dict[int, Any]:
        self._read_end, self._wake_end = socket.socketpair()
        self._read_end.setblocking(False)
        self._wake_end.setblocking(False)
        self._selector.register(self._read_end, selectors.EVENT_READ, None)
        self._previous_wakeup = signal.set_wakeup_fd(self._wake_end.fileno())
        # One started with nohup goes on when its terminal is gone.
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
        return {number: signal.signal(number, self._signalled) for number in _PASSED_ON if number not in ignored}

    def _woken(self) -> None:
        """Empty the pipe by which a signal woke the loop; its handler has noted it."""
        with suppress(BlockingIOError):
            os.read(self._read_end.fileno(), 4096)

    def _release_signals(self, previous: dict[int, Any]) -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        self._read_end.close()
        self._wake_end.close()

    def _signalled(self, number: int, _: FrameType | None) -> None:
        self._signals.append(number)
        now = time.monotonic()
        self._stopping = True
        if len(self._signals) > 1:
            self._deadlines = [(now, signal.SIGKILL)]
            return
        self._announce_at = now + ANNOUNCE_SECONDS
        grace = now + (INTERRUPT_SECONDS if number == signal.SIGINT else 0.0)
        self._deadlines = [
            (now, number),
            (grace, signal.SIGTERM),
            (max(grace, now + INTERRUPT_SECONDS) + TERMINATE_SECONDS, signal.SIGKILL),
        ]
