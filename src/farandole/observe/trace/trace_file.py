"""A file of trace events (Chrome's format, a JSON array) that can be read while it is written.

[Note: valid at any time] The file always ends with the array's bracket; a write begins on the bracket and ends
with a new one, in one system call. No write is larger than the rest of a page of memory, unless a single
event is: the kernel ends a killed process between pages, not inside one. So what a reader finds after a kill is
whole; the one event in a page that lies across its end may be cut, which viewers accept and `read_trace`
repairs. A machine that loses power may lose what the kernel had not yet written.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...core.vocabulary.errors import ConfigError, DataError

PAGE_BYTES = 4096
_OPENING = b"["
_CLOSING = b"\n]\n"


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
        """Where the closing bracket's line begins: the next write begins there."""
        self._first = True
        self._put(_OPENING)

    def write(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Append events; on return the file is whole and holds them."""
        piece = bytearray()
        for event in events:
            line = encode(event) if self._first else b"," + encode(event)
            self._first = False
            room = PAGE_BYTES - self._end % PAGE_BYTES - len(_CLOSING)
            if piece and len(piece) + len(line) > room:
                self._put(piece)
                piece = bytearray()
            piece += line
        if piece:
            self._put(piece)

    def close(self) -> None:
        """Close the file, which is whole already."""
        os.close(self._descriptor)

    def _put(self, data: bytes | bytearray) -> None:
        whole = bytes(data) + _CLOSING
        written = 0
        try:
            while written < len(whole):
                written += os.pwrite(self._descriptor, whole[written:], self._end + written)
        except OSError:
            # A full disk: what was there before is worth having whole.
            with contextlib.suppress(OSError):
                os.pwrite(self._descriptor, _CLOSING, self._end)
                os.ftruncate(self._descriptor, self._end + len(_CLOSING))
            raise
        self._end += len(data)


def encode(event: Mapping[str, Any]) -> bytes:
    """Return an event as one line of ASCII that begins with a line break."""
    return b"\n" + json.dumps(event, separators=(",", ":")).encode("ascii")


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace file; an event that a kill has cut at the end is left out.

    Raises `DataError` when it cannot be read or is no trace.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as problem:
        raise DataError(f"cannot read {path}: {problem.strerror or problem}") from None
    found = _parse(text)
    events = found.get("traceEvents") if isinstance(found, dict) else found
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise DataError(
            f"{path} is no timeline: expected a JSON array of trace events",
            remedy="give the files that the ranks of one job have written",
        )
    return events


def _parse(text: str) -> Any:
    for candidate in _candidates(text):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(candidate)
    return None


def _candidates(text: str) -> Iterator[str]:
    """The text; with its bracket restored; without its last line, too."""
    yield text
    whole = text.rstrip()
    yield whole.rstrip(",") + "]"
    yield whole.rpartition("\n")[0].rstrip().rstrip(",") + "]"
