"""Reading a trace file of PyTorch's profiler: plain or through gzip, an object with an array of events.

A file is read once, from its begin to its end, and what is held of it does not depend on its length.
"""

from __future__ import annotations

import codecs
import gzip
import math
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...core.vocabulary.errors import DataError
from .json_stream import Damaged, JsonStream

_EVENTS = "traceEvents"
PIECE_BYTES = 1 << 18


class Trace:
    """A file, read by `events`; after the last event its `head` is known too."""

    def __init__(self, path: Path, keys: Collection[str], *, piece_bytes: int = PIECE_BYTES) -> None:
        self.path = path
        self.head: dict[str, Any] = {}
        """What stands beside the events by the `keys` that were asked for."""
        self._keys = frozenset(keys)
        self._piece_bytes = piece_bytes
        self._count = 0

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events that are objects with finite times, once, in the file's order. Raises DataError."""
        stream = JsonStream(self._pieces())
        if stream.peek() != "{":
            raise self._no_trace()
        try:
            yield from self._object(stream)
            stream.end()
        except Damaged as problem:
            how = "cut short" if problem.is_cut else "damaged"
            raise DataError(
                f"{self.path} is {how} after {self._count:,} events: {problem}",
                remedy="was it copied whole, and had its writer ended? write or copy it again",
            ) from None

    def _object(self, stream: JsonStream) -> Iterator[dict[str, Any]]:
        stream.expect("{")
        found = False
        for key in stream.members():
            if key != _EVENTS:
                value = stream.value()
                if key in self._keys:
                    self.head[key] = value
                continue
            if found:
                raise DataError(f"{self.path} has {_EVENTS} twice, expected one array of events")
            if stream.peek() != "[":
                raise self._no_trace()
            found = True
            stream.expect("[")
            yield from self._sound(stream)
        if not found:
            raise self._no_trace()

    def _sound(self, stream: JsonStream) -> Iterator[dict[str, Any]]:
        for event in stream.elements():
            self._count += 1
            if isinstance(event, dict) and _is_sound(event):
                yield event

    def _no_trace(self) -> DataError:
        return DataError(
            f"{self.path} is no trace of PyTorch's profiler: expected a JSON object with {_EVENTS}",
            remedy="give what export_chrome_trace of torch.profiler wrote",
        )

    def _pieces(self) -> Iterator[str]:
        decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        done = 0
        try:
            with self.path.open("rb") as raw:
                is_packed = raw.peek(2)[:2] == b"\x1f\x8b"
                with gzip.GzipFile(fileobj=raw) if is_packed else raw as file:
                    while piece := file.read(self._piece_bytes):
                        done += len(piece)
                        yield decode(piece)
        except (OSError, EOFError, zlib.error) as problem:
            after = f", after {done:,} bytes of text and {self._count:,} events" if done else ""
            why = getattr(problem, "strerror", None) or problem
            raise DataError(f"cannot read {self.path}: {why}{after}") from None
        yield decode(b"", final=True)


def _is_sound(event: Mapping[str, Any]) -> bool:
    return (
        is_number(event.get("ts", 0))
        and is_number(event.get("dur", 0))
        and isinstance(event.get("args", {}), dict)
    )


def is_number(value: object) -> bool:
    """Return whether it is a finite number of a size that times have, and no truth value."""
    if isinstance(value, float):
        return math.isfinite(value)
    return type(value) is int and -_MOST < value < _MOST


_MOST = 1 << 200
