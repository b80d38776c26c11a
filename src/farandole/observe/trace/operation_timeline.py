"""What happened to each named operation, as a trace that chrome://tracing and Perfetto show.

The events and their names are those of Horovod's timeline, so that eyes and tools that know it read ours:
every operation's name is a "process" of the trace; in it NEGOTIATE_ALLREDUCE from this rank's request until all
ranks are ready, with an instant for each rank that came, then ALLREDUCE with its phases. Other than there,
every rank writes a file (`timeline_path`), and `merge_timelines` makes one of them.

::

    log = OperationTimeline("timeline.json", rank=0, size=2)
    ...                       # the negotiation engine calls submitted, rank_ready, begun, activity, finished
    log.close()

[Note: cost of the timeline] The calls append a tuple to a queue; a thread of its own, asleep while nothing
happens, gathers for `GATHER_SECONDS`, orders and writes. A queue that is full loses events, and the file says
how many; what is written is well formed all the same, because the order of begin and end is made by the
writer from what it has written (`OperationEvents`), not by the caller.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.notice import write_notice
from .operation_events import OperationEvents
from .trace_file import TraceFile

GATHER_SECONDS = 0.02
"""How long the writer waits for more before it writes."""
QUEUE_LIMIT = 100_000
"""Calls that may wait for the writer, about 20 MB."""
CLOSE_SECONDS = 10.0
"""How long `close` waits for what is queued to be written."""


def timeline_path(path: str | os.PathLike[str], rank: int) -> Path:
    """Return where a rank writes: rank 0 to `path`, the others beside it.

    >>> str(timeline_path("out/timeline.json", 3))
    'out/timeline.rank3.json'
    """
    whole = Path(path)
    return whole if rank == 0 else whole.with_name(f"{whole.stem}.rank{rank}{whole.suffix}")


class OperationTimeline:
    """Writes one rank's timeline. An `OperationLog` of the negotiation engine.

    With `mark_cycles`, an instant CYCLE_START begins every round of operations that travel. The file is valid
    JSON at any time, also after a kill. When it can no longer be written (a full disk), a line on the standard
    error says so and the job goes on. Raises `ConfigError` when it cannot be created.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        rank: int,
        size: int,
        mark_cycles: bool = False,
        *,
        queue_limit: int = QUEUE_LIMIT,
    ) -> None:
        if not Path(path).name:
            raise ConfigError(
                f"the timeline's path {os.fspath(path)!r} names no file",
                remedy="name one, for example timeline.json",
            )
        self.path = timeline_path(path, rank)
        self._limit = queue_limit
        self._queue: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._dropped = 0
        self._process = os.getpid()
        self._closing = threading.Event()
        self._wake = threading.Event()
        start_seconds, epoch = time.monotonic(), time.time_ns() // 1000
        self._file: TraceFile | None = TraceFile(self.path)
        self._events = OperationEvents(start_seconds, mark_cycles)
        self._events.header(epoch, rank, size, socket.gethostname())
        self._write()
        self._thread = threading.Thread(target=self._run, name="farandole-timeline", daemon=True)
        self._thread.start()

    @property
    def is_on(self) -> bool:
        """Whether it still takes anything."""
        return not self._closing.is_set()

    def submitted(self, name: str, kind: str, at_seconds: float) -> None:
        """This rank asked for the operation."""
        self._take(self._events.submitted, name, kind, at_seconds)

    def rank_ready(self, name: str, rank: int, at_seconds: float) -> None:
        """That rank was seen to be ready."""
        self._take(self._events.rank_ready, name, rank, at_seconds)

    def begun(self, name: str, kind: str, at_seconds: float) -> None:
        """All ranks are ready."""
        self._take(self._events.begun, name, kind, at_seconds)

    def activity(self, names: Sequence[str], activity: str, begin_seconds: float, end_seconds: float) -> None:
        """One phase of the operations that travel together."""
        self._take(self._events.activity, tuple(names), activity, begin_seconds, end_seconds)

    def finished(self, name: str, dtype: str, shape: Sequence[int], at_seconds: float, error: str = "") -> None:
        """The operation has ended."""
        self._take(self._events.finished, name, dtype, tuple(shape), at_seconds, error)

    def close(self) -> None:
        """Write what is queued and close the file. May be called twice; later calls are ignored."""
        if self._closing.is_set() or os.getpid() != self._process:
            return  # a forked child has no writer, and must not touch its parent's file
        self._closing.set()
        self._wake.set()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            write_notice(f"{self.path} was not written to its end within {CLOSE_SECONDS:g} s")

    def _take(self, call: Callable[..., None], *arguments: Any) -> None:
        if self._closing.is_set():
            return
        if len(self._queue) >= self._limit:
            self._dropped += 1
            return
        self._queue.append((call, arguments))
        # The writer clears the flag before it empties the queue: an event queued while it is set will be read.
        if not self._wake.is_set():
            self._wake.set()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wake.wait()
            self._closing.wait(GATHER_SECONDS)
            self._wake.clear()
            self._empty()
        self._empty()
        if self._file is not None:
            try:
                self._file.close()
            except OSError as problem:
                self._stop(problem)

    def _empty(self) -> None:
        """Write all that is queued."""
        dropped, self._dropped = self._dropped, 0
        for _ in range(len(self._queue)):
            call, arguments = self._queue.popleft()
            call(*arguments)
        if dropped:
            self._events.dropped(dropped, time.monotonic())
        self._write()

    def _write(self) -> None:
        events = self._events.take()
        if self._file is None or not events:
            return
        try:
            self._file.write(events)
        except OSError as problem:
            self._stop(problem)

    def _stop(self, problem: OSError) -> None:
        write_notice(f"the timeline ends here, cannot write {self.path}: {problem}")
        self._file = None
