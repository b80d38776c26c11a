"""Traces that chrome://tracing and Perfetto show: the JSON of their events, writing files of them, and reading.

[Note: a trace without its end] The closing bracket is written last, so a file that is looked at while it is
written, or after a kill, has none: viewers do without, and so does `read_trace`. A write ends with an event, and
is no larger than the rest of a page of memory unless a single event is: the kernel ends a killed process between
pages, not inside one. An event that lies across the end of a page may be cut, which `read_trace` repairs.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from ...core.vocabulary.errors import ConfigError, DataError
from .source import write_output

TraceEvent = dict[str, Any]
PAGE_BYTES = 4096
_OPENING, _CLOSING = b"[", b"\n]\n"


def make_event(phase: str, name: str | None, process: int, at_micros: float, **more: Any) -> TraceEvent:
    """Return an event; what is None is left out."""
    made = {"ph": phase, "name": name, "ts": at_micros, "pid": process, **more}
    return {key: value for key, value in made.items() if value is not None}


def name_events(of: str, ids: Mapping[str, int], order: int, **facts: Any) -> list[TraceEvent]:
    """Return what names a process or a thread, which `of` says, and gives it its place among others."""
    return [
        {"name": f"{of}_name", "ph": "M", **ids, "args": facts},
        {"name": f"{of}_sort_index", "ph": "M", **ids, "args": {"sort_index": order}},
    ]


def _lines(events: Iterable[TraceEvent], *, first: bool) -> Iterator[bytes]:
    for event in events:
        text = json.dumps(event, separators=(",", ":"), allow_nan=False)
        yield f"\n{text}".encode() if first else f",\n{text}".encode()
        first = False


def write_trace(path: Path, events: Iterable[TraceEvent], head: Mapping[str, Any] | None = None) -> Path:
    """Write a trace as a stream, so of any size: an array, or an object of `head` and ``traceEvents``."""
    begin, end = ("", "") if head is None else (json.dumps(head)[:-1] + ', "traceEvents": ', "}")
    whole = chain([begin.encode() + _OPENING], _lines(events, first=True), [f"\n]{end}\n".encode()])
    return write_output(path, whole)


class TraceFile:
    """Appends events to a new private file at `path`, replacing one that is there.

    Raises `ConfigError` when it cannot be created; `write` and `close` raise OSError.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except (OSError, ValueError) as problem:
            raise ConfigError(
                f"cannot write the timeline {str(path)!r}: {getattr(problem, 'strerror', None) or problem}",
                remedy="give the path of a file in an existing directory that this user may write to",
            ) from None
        self._end = 0

    def write(self, events: Iterable[TraceEvent]) -> None:
        """Append events; on return the file holds them."""
        piece = b"" if self._end else _OPENING
        for line in _lines(events, first=not self._end):
            if piece and self._end % PAGE_BYTES + len(piece) + len(line) > PAGE_BYTES:
                self._put(piece)
                piece = b""
            piece += line
        self._put(piece)

    def close(self) -> None:
        """End the array, and close the file."""
        try:
            self._put(_CLOSING if self._end else _OPENING + _CLOSING)
        finally:
            os.close(self._descriptor)

    def _put(self, piece: bytes) -> None:
        end = self._end + len(piece)
        try:
            while piece:
                piece = piece[os.write(self._descriptor, piece) :]
        except OSError:
            # A full disk: what was there before is worth having whole.
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._end)
            raise
        self._end = end


def read_trace(path: Path) -> list[TraceEvent]:
    """Return the events of a trace file; an event that a kill has cut at the end is left out.

    Raises `DataError` when it cannot be read or is no trace.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as problem:
        raise DataError(f"cannot read {path}: {problem.strerror or problem}") from None
    found: Any = None
    whole = text.rstrip()
    without_last = whole.rpartition("\n")[0].rstrip()
    for candidate in (text, whole.rstrip(",") + "]", without_last.rstrip(",") + "]"):
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(candidate)
            break
    events = found.get("traceEvents") if isinstance(found, dict) else found
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise DataError(
            f"{path} is no timeline: expected a JSON array of trace events",
            remedy="give the files that the ranks of one job have written",
        )
    return events
