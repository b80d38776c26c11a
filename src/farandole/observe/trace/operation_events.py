"""Trace events of named operations: begin and end always nest, and times never decrease.

Knows no file and no thread. Calls may come late, twice or not at all (a full queue): an end without a begin is
not written, and a begin ends what was still open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NEGOTIATE = "NEGOTIATE_"
CYCLE_START = "CYCLE_START"
DROPPED = "DROPPED_EVENTS"
ERROR = "ERROR"
HEADER = 0
"""The trace's process that stands for the rank itself."""


@dataclass
class _Track:
    """One operation's name: a process of the trace."""

    process: int
    at_micros: int = 0
    """Time of the last event."""
    open: str = ""
    """What has begun and not ended: NEGOTIATE_..., an operation, or nothing."""


class OperationEvents:
    """Makes the events of one rank; `take` returns those made since it was last called.

    Times given are seconds of the clock of which `start_seconds` is the trace's zero.
    """

    def __init__(self, start_seconds: float, mark_cycles: bool) -> None:
        self._start_seconds = start_seconds
        self._mark_cycles = mark_cycles
        self._travelling = False
        """Whether the round of operations that has begun is still gathering."""
        self._rank = _Track(HEADER)
        self._tracks: dict[str, _Track] = {}
        self._made: list[dict[str, Any]] = []

    def take(self) -> list[dict[str, Any]]:
        """Return what was made since the last call."""
        made, self._made = self._made, []
        return made

    def header(self, start_time_since_epoch_in_micros: int, rank: int, size: int, host: str) -> None:
        """Say whose trace it is and when its zero was."""
        whose = {"name": f"rank {rank} of {size} on {host}", "rank": rank, "size": size, "host": host}
        self._name(HEADER, {"start_time_since_epoch_in_micros": start_time_since_epoch_in_micros, **whose})

    def submitted(self, name: str, kind: str, at_seconds: float) -> None:
        """This rank asked for the operation."""
        track = self._track(name)
        self._end(track, at_seconds)
        self._begin(track, NEGOTIATE + kind.upper(), at_seconds)

    def rank_ready(self, name: str, rank: int, at_seconds: float) -> None:
        """Another rank was seen to be ready, or this one."""
        track = self._track(name)
        self._made.append(
            {"ph": "X", "name": str(rank), "ts": self._at(track, at_seconds), "pid": track.process, "dur": 0}
        )

    def begun(self, name: str, kind: str, at_seconds: float) -> None:
        """The negotiation has ended, the operation begins."""
        if self._mark_cycles and not self._travelling:
            self._instant(CYCLE_START, at_seconds)
        self._travelling = True
        track = self._track(name)
        self._end(track, at_seconds)
        self._begin(track, kind.upper(), at_seconds)

    def activity(self, names: Sequence[str], activity: str, begin_seconds: float, end_seconds: float) -> None:
        """One phase of the operations that travel together."""
        self._travelling = False
        for name in names:
            track = self._track(name)
            before, track.open = track.open, ""
            self._begin(track, activity, begin_seconds)
            self._end(track, end_seconds)
            track.open = before

    def finished(self, name: str, dtype: str, shape: Sequence[int], at_seconds: float, error: str) -> None:
        """The operation has ended."""
        self._travelling = False
        track = self._track(name)
        arguments: dict[str, Any] = {"dtype": dtype, "shape": str(list(shape))} if dtype else {}
        if error:
            arguments["error"] = error
            if track.open.startswith(NEGOTIATE):
                self._end(track, at_seconds)
                self._begin(track, ERROR, at_seconds)
        self._end(track, at_seconds, arguments)

    def dropped(self, count: int, at_seconds: float) -> None:
        """So many calls are missing here."""
        self._instant(DROPPED, at_seconds, {"count": count})

    def _track(self, name: str) -> _Track:
        track = self._tracks.get(name)
        if track is None:
            track = self._tracks[name] = _Track(len(self._tracks) + 1)
            self._name(track.process, {"name": name})
        return track

    def _name(self, process: int, arguments: dict[str, Any]) -> None:
        common = {"ph": "M", "pid": process}
        self._made.append({"name": "process_name", **common, "args": arguments})
        self._made.append({"name": "process_sort_index", **common, "args": {"sort_index": process}})

    def _begin(self, track: _Track, name: str, at_seconds: float) -> None:
        track.open = name
        self._made.append({"ph": "B", "name": name, "ts": self._at(track, at_seconds), "pid": track.process})

    def _end(self, track: _Track, at_seconds: float, arguments: dict[str, Any] | None = None) -> None:
        if not track.open:
            return
        track.open = ""
        event: dict[str, Any] = {"ph": "E", "ts": self._at(track, at_seconds), "pid": track.process}
        self._made.append({**event, "args": arguments} if arguments else event)

    def _instant(self, name: str, at_seconds: float, arguments: dict[str, Any] | None = None) -> None:
        at = self._at(self._rank, at_seconds)
        event = {"ph": "i", "name": name, "ts": at, "pid": HEADER, "s": "g"}
        self._made.append({**event, "args": arguments} if arguments else event)

    def _at(self, track: _Track, at_seconds: float) -> int:
        track.at_micros = max(track.at_micros, round((at_seconds - self._start_seconds) * 1e6))
        return track.at_micros
