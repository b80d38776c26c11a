"""What happened to each named operation, and to the gradient engine's buckets, as a trace.

The events and their names are those of Horovod's timeline, so that eyes and tools that know it read ours:
every operation's name is a "process" of the trace; in it NEGOTIATE_ALLREDUCE from this rank's request until all
ranks are ready, with an instant for each rank that came, then ALLREDUCE with its phases. Other than there,
every rank writes a file (`timeline_path`), and `merge_timelines` makes one of them.

::

    log = OperationTimeline(rank=0, size=2)
    log.start("timeline.json")
    ...                       # the negotiation engine calls submitted, rank_ready, begun, activity, finished
    log.stop()

[Note: cost of the timeline] The calls append to a queue; a thread of its own, asleep while nothing happens,
gathers for `GATHER_SECONDS`, orders and writes. A queue that is full loses events, and the file says how many;
what is written is well formed all the same, because the order of begin and end is made by the writer from what
it has written (`OperationEvents`), not by the caller.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Concatenate, ParamSpec

from ...core.vocabulary.errors import ConfigError, DataError
from ...core.vocabulary.events import Event, Exchange
from ...core.vocabulary.text import write_notice
from .trace_file import TraceEvent, TraceFile, make_event, name_events, read_trace, write_trace

GATHER_SECONDS = 0.02
"""How long the writer waits for more before it writes."""
QUEUE_LIMIT = 100_000
"""Calls that may wait for the writer, about 20 MB."""
CLOSE_SECONDS = 10.0
"""How long `stop` waits for what is queued to be written."""
NEGOTIATE = "NEGOTIATE_"
HEADER = 0
"""The trace's process that stands for the rank itself."""
NAMES_SHOWN = 3
_P = ParamSpec("_P")


@dataclass
class _Track:
    """One operation's name: a process of the trace."""

    process: int
    at_micros: int = 0
    """Time of the last event."""
    open: str = ""
    """What has begun and not ended: NEGOTIATE_..., an operation, or nothing."""


class OperationEvents:
    """Makes the events of one rank: begin and end always nest, and times never decrease.

    Times given are seconds of the clock of which `start_seconds` is the trace's zero; `take` returns the events
    made since it was last called. Calls may come late, twice or not at all (a full queue): an end without a begin
    is not written, and a begin ends what was still open.
    """

    def __init__(self, start_seconds: float, mark_cycles: bool) -> None:
        self._start_seconds = start_seconds
        self._mark_cycles = mark_cycles
        self._travelling = False
        """Whether the round of operations that has begun is still gathering."""
        self._rank = _Track(HEADER)
        self._tracks: dict[str, _Track] = {}
        self._made: list[TraceEvent] = []

    def take(self) -> list[TraceEvent]:
        """Return what was made since the last call."""
        made, self._made = self._made, []
        return made

    def header(self, start_time_since_epoch_in_micros: int, rank: int, size: int, host: str) -> None:
        """Say whose trace it is and when its zero was."""
        start = {"start_time_since_epoch_in_micros": start_time_since_epoch_in_micros}
        whose = {"name": f"rank {rank} of {size} on {host}", "rank": rank, "size": size, "host": host}
        self._made += name_events("process", {"pid": HEADER}, HEADER, **start, **whose)

    def submitted(self, name: str, kind: str, at_seconds: float) -> None:
        """This rank asked for the operation."""
        self._begin(self._track(name), NEGOTIATE + kind.upper(), at_seconds)

    def rank_ready(self, name: str, rank: int, at_seconds: float) -> None:
        """Another rank was seen to be ready, or this one."""
        self._make("X", str(rank), self._track(name), at_seconds, dur=0)

    def begun(self, name: str, kind: str, at_seconds: float) -> None:
        """All ranks are ready: the negotiation has ended, the operation begins."""
        if self._mark_cycles and not self._travelling:
            self._make("i", "CYCLE_START", self._rank, at_seconds, s="g")
        self._travelling = True
        self._begin(self._track(name), kind.upper(), at_seconds)

    def activity(self, names: Sequence[str], activity: str, begin_seconds: float, end_seconds: float) -> None:
        """One phase of the operations that travel together."""
        self._travelling = False
        for track in map(self._track, names):
            before, track.open = track.open, ""
            self._begin(track, activity, begin_seconds)
            self._end(track, end_seconds)
            track.open = before

    def finished(self, name: str, dtype: str, shape: Sequence[int], at_seconds: float, error: str = "") -> None:
        """The operation has ended."""
        self._travelling = False
        track = self._track(name)
        facts: dict[str, Any] = {"dtype": dtype, "shape": str(list(shape))} if dtype else {}
        if error:
            facts["error"] = error
            if track.open.startswith(NEGOTIATE):
                self._begin(track, "ERROR", at_seconds)
        self._end(track, at_seconds, facts or None)

    def dropped(self, count: int, at_seconds: float) -> None:
        """So many calls are missing here."""
        self._make("i", "DROPPED_EVENTS", self._rank, at_seconds, s="g", args={"count": count})

    def _track(self, name: str) -> _Track:
        track = self._tracks.get(name)
        if track is None:
            number = len(self._tracks) + 1
            track = self._tracks[name] = _Track(number)
            self._made += name_events("process", {"pid": number}, number, name=name)
        return track

    def _begin(self, track: _Track, name: str, at_seconds: float) -> None:
        self._end(track, at_seconds)
        track.open = name
        self._make("B", name, track, at_seconds)

    def _end(self, track: _Track, at_seconds: float, facts: dict[str, Any] | None = None) -> None:
        if track.open:
            track.open = ""
            self._make("E", None, track, at_seconds, args=facts)

    def _make(self, phase: str, name: str | None, track: _Track, at_seconds: float, **more: Any) -> None:
        track.at_micros = max(track.at_micros, round((at_seconds - self._start_seconds) * 1e6))
        self._made.append(make_event(phase, name, track.process, track.at_micros, **more))


def timeline_path(path: str | os.PathLike[str], rank: int) -> Path:
    """Return where a rank writes: rank 0 to `path`, the others beside it.

    >>> str(timeline_path("out/timeline.json", 3))
    'out/timeline.rank3.json'
    """
    whole = Path(path)
    return whole if rank == 0 else whole.with_name(f"{whole.stem}.rank{rank}{whole.suffix}")


class _Writer(threading.Thread):
    """Makes the calls that are queued, and writes what they make. It ends at a None."""

    def __init__(self, path: Path, events: OperationEvents) -> None:
        super().__init__(name="farandole-timeline", daemon=True)
        self.path = path
        self.queue: SimpleQueue[Callable[[OperationEvents], None] | None] = SimpleQueue()
        self.dropped = 0
        self._events = events
        self._file = TraceFile(path)

    def run(self) -> None:
        """Write until the end, or until the disk is full."""
        try:
            self._file.write(self._events.take())
            while self._write_queued():
                pass
            self._file.close()
        except OSError as problem:
            write_notice(f"the timeline ends here, cannot write {self.path}: {problem}")

    def _write_queued(self) -> bool:
        """Write all that is queued; return whether more may come."""
        calls = [self.queue.get()]
        if calls[0] is not None:
            time.sleep(GATHER_SECONDS)
        calls += [self.queue.get() for _ in range(self.queue.qsize())]
        dropped, self.dropped = self.dropped, 0
        for call in calls:
            if call is not None:
                call(self._events)
        if dropped:
            self._events.dropped(dropped, time.monotonic())
        self._file.write(self._events.take())
        return None not in calls


def _queued(
    call: Callable[Concatenate[OperationEvents, _P], None],
) -> Callable[Concatenate[OperationTimeline, _P], None]:
    """Return a method that lets the writer make the call, if there is one."""

    def take(self: OperationTimeline, /, *arguments: _P.args, **named: _P.kwargs) -> None:
        writer = self._writer
        # Its thread is gone after a full disk, and in a forked child.
        if writer is None or not writer.is_alive():
            return
        if writer.queue.qsize() >= QUEUE_LIMIT:
            writer.dropped += 1
            return
        writer.queue.put(lambda events: call(events, *arguments, **named))

    return take


class OperationTimeline:
    """Writes one rank's timeline while there is one. An `OperationLog` of the negotiation engine.

    When the file can no longer be written (a full disk), a line on the standard error says so and the job goes
    on. A killed job leaves all but the file's last bracket.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._writer: _Writer | None = None

    def start(self, path: str | os.PathLike[str], *, mark_cycles: bool = False) -> None:
        """Write to `path` from now on; the timeline so far, if any, is finished.

        With `mark_cycles`, an instant CYCLE_START begins every round of operations that travel. Raises
        `ConfigError` when the file cannot be created.
        """
        self.stop()
        if not Path(path).name:
            raise ConfigError(
                f"the timeline's path {os.fspath(path)!r} names no file",
                remedy="name one, for example timeline.json",
            )
        events = OperationEvents(time.monotonic(), mark_cycles)
        events.header(time.time_ns() // 1000, self._rank, self._size, socket.gethostname())
        writer = _Writer(timeline_path(path, self._rank), events)
        writer.start()
        self._writer = writer

    def stop(self) -> None:
        """Write what is queued and finish the file. May be called twice; later calls are ignored."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.queue.put(None)
            writer.join(CLOSE_SECONDS)  # at once in a forked child, which has no such thread
            if writer.is_alive():
                write_notice(f"{writer.path} was not written to its end within {CLOSE_SECONDS:g} s")

    @property
    def is_on(self) -> bool:
        """Whether there is one."""
        return self._writer is not None

    submitted = _queued(OperationEvents.submitted)
    rank_ready = _queued(OperationEvents.rank_ready)
    begun = _queued(OperationEvents.begun)
    activity = _queued(OperationEvents.activity)
    finished = _queued(OperationEvents.finished)


class BucketTimeline:
    """A `Recorder` that writes every exchange of gradients to `log`, which others may share.

    The gradient engine negotiates nothing, so a bucket's operation begins when it is launched. It is seen to have
    arrived only when all have: every bucket of an exchange ends with it. One more lane shows the exchange as a
    whole, and within it how long the rank had nothing to do but wait, which is what communication costs. `names`
    gives the parameters of each bucket in launch order, as they are now: codecs that change build other buckets.
    """

    def __init__(self, log: OperationTimeline, names: Callable[[], Sequence[Sequence[str]]]) -> None:
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
        log.activity([whole], "WAIT", event.wait_begin_seconds, end)
        for lane, _ in begins:
            log.finished(lane, "", (), end)


def lane_name(kind: str, parameters: Sequence[str]) -> str:
    """Return what the lane of these parameters is called; another optimizer's has another name.

    >>> lane_name("bucket 2", ["fc1.weight", "fc1.bias", "conv.weight", "conv.bias"])
    'bucket 2: fc1.weight, fc1.bias, conv.weight and 1 more'
    """
    shown, more = ", ".join(parameters[:NAMES_SHOWN]), len(parameters) - NAMES_SHOWN
    return kind + (f": {shown}" if shown else "") + (f" and {more} more" if more > 0 else "")


# The timelines of all ranks as one trace, on one clock.
#
# Each file says when its zero was, in the wall time of its host; that is the clock they are put on. Hosts whose
# clocks are kept by NTP agree to about a millisecond, so on different hosts trust longer differences only; ranks
# of one host share a clock.


_EPOCH = "start_time_since_epoch_in_micros"
_MOST = 2**62


def merge_timelines(paths: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> int:
    """Write the timelines at `paths`, one a rank, as one to `out`; return the number of events.

    Processes of the trace are grouped by rank. Raises `DataError` for a file that is no timeline, that does not
    say when it began, or whose rank another one has too.
    """
    found: dict[int, tuple[Path, int, list[TraceEvent]]] = {}
    for position, path in enumerate(map(Path, paths)):
        rank, epoch, events = _read(path, position)
        if rank in found:
            raise DataError(
                f"{found[rank][0]} and {path} are both of rank {rank}, expected one file a rank",
                remedy="leave one out; an earlier run's files may lie beside those of the last",
            )
        found[rank] = path, epoch, events
    if not found:
        raise DataError("no timeline to merge", remedy="name the files of the ranks, for example timeline*.json")
    first = min(epoch for _, epoch, _ in found.values())
    stride = 1 + max(event["pid"] for _, _, events in found.values() for event in events)
    merged = [
        _moved(event, rank, rank * stride, epoch - first)
        for rank, (_, epoch, events) in sorted(found.items())
        for event in events
    ]
    write_trace(Path(out), merged)
    return len(merged)


def _read(path: Path, position: int) -> tuple[int, int, list[TraceEvent]]:
    """Return rank, zero and events of a file. One that does not say its rank (Horovod's) has its position's."""
    events = read_trace(path)
    header: dict[str, Any] = {}
    for event in events:
        # Some writers leave the process out of instants that concern all of them.
        process, at, values = event.setdefault("pid", HEADER), event.get("ts", 0), event.setdefault("args", {})
        is_time = type(at) in (int, float) and -_MOST < at < _MOST
        if not _is_count(process) or not is_time or not isinstance(values, dict):
            raise DataError(
                f"{path}: an event has pid {process!r}, ts {at!r}, args {values!r}; expected numbers, an object",
                remedy="give files that the ranks of one job have written",
            )
        if event.get("ph") == "M" and process == HEADER:
            header |= values
    rank: Any = header.get("rank", position)
    epoch: Any = header.get(_EPOCH)
    if not _is_count(epoch) or not _is_count(rank):
        raise DataError(
            f"{path} does not say when it began: {_EPOCH} is {epoch!r} and rank {rank!r}, expected counts",
            remedy="a merged file cannot be merged again: give the files of the ranks",
        )
    return rank, epoch, events


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _moved(event: TraceEvent, rank: int, first_process: int, shift_micros: int) -> TraceEvent:
    """Return the event on the common clock, among the processes of its rank."""
    values, process = event["args"], first_process + event["pid"]
    if event.get("ph") == "M":
        if event.get("name") == "process_sort_index":
            values = {"sort_index": process}
        elif event["pid"] == HEADER:
            values = {"name": f"rank {rank}", **values}
            values.pop(_EPOCH, None)
        elif "name" in values:
            values = {**values, "name": f"{rank}: {values['name']}"}
    moved = {**event, "pid": process, "args": values}
    if not values:
        del moved["args"]
    if "ts" in moved:
        moved["ts"] += shift_micros
    if moved.get("s") == "g":
        moved["s"] = "p"  # a round of one rank is none of the others
    return moved
