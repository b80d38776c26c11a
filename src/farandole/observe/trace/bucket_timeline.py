"""The gradient engine's buckets in the timeline of named operations.

The engine negotiates nothing, so a bucket's operation begins when it is launched. It is seen to have arrived
only when all have: every bucket of an exchange ends with it. One more lane shows the exchange as a whole, and
within it how long the rank had nothing to do but wait, which is what communication costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ...core.vocabulary.events import Event, Exchange

WAIT = "WAIT"
NAMES_SHOWN = 3


class Log(Protocol):
    """What is used of an `OperationTimeline`, or of something that passes calls on to one."""

    def begun(self, name: str, kind: Any, at_seconds: float) -> None:
        """The operation begins."""

    def activity(self, names: Sequence[str], activity: str, begin_seconds: float, end_seconds: float) -> None:
        """One phase of it."""

    def finished(self, name: str, dtype: str, shape: Sequence[int], at_seconds: float, error: str = "") -> None:
        """It has ended."""


class BucketTimeline:
    """A `core.events.Recorder` that writes every exchange of gradients to `log`, which others may share.

    `names` gives the parameters of each bucket in launch order, as they are now: codecs that change build
    other buckets.
    """

    def __init__(self, log: Log, names: Callable[[], Sequence[Sequence[str]]]) -> None:
        self._log = log
        self._names = names

    def record(self, event: Event) -> None:
        """Take one event."""
        if not isinstance(event, Exchange) or not event.launch_seconds:
            return
        names, log, end = self._names(), self._log, event.wait_end_seconds
        whole = lane_name("gradients", [name for bucket in names for name in bucket])
        begins = [(whole, event.launch_seconds[0])]
        for position, at in enumerate(event.launch_seconds):
            begins.append((lane_name(f"bucket {position}", names[position] if position < len(names) else ()), at))
        for lane, at in begins:
            log.begun(lane, "allreduce", at)
        log.activity([whole], WAIT, event.wait_begin_seconds, end)
        for lane, _ in begins:
            log.finished(lane, "", (), end)

    def close(self) -> None:
        """Nothing: the timeline belongs to who made it."""


def lane_name(kind: str, parameters: Sequence[str]) -> str:
    """Return what the lane of these parameters is called; another optimizer's has another name.

    >>> lane_name("bucket 2", ["fc1.weight", "fc1.bias", "conv.weight", "conv.bias"])
    'bucket 2: fc1.weight, fc1.bias, conv.weight and 1 more'
    """
    shown, more = ", ".join(parameters[:NAMES_SHOWN]), len(parameters) - NAMES_SHOWN
    return kind + (f": {shown}" if shown else "") + (f" and {more} more" if more > 0 else "")
