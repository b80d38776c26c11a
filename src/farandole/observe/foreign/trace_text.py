"""Reading a trace file of any tool: plain or through gzip, an array of events or an object that has one."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import DataError


@dataclass(frozen=True)
class Trace:
    """What is in a file."""

    path: Path
    head: Mapping[str, Any]
    """What stands beside the events; empty for a plain array."""
    events: list[dict[str, Any]]
    """Those that are objects, with finite times."""


def read_trace_text(path: Path) -> Trace:
    """Read a trace; an array that a kill has cut is read up to there. Raises `DataError`."""
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as problem:
        raise DataError(f"cannot read {path}: {getattr(problem, 'strerror', None) or problem}") from None
    found = _parse(data.decode("utf-8", errors="replace"))
    head = {key: value for key, value in found.items() if key != "traceEvents"} if isinstance(found, dict) else {}
    events = found.get("traceEvents") if isinstance(found, dict) else found
    if not isinstance(events, list):
        raise DataError(f"{path} is no trace: expected a JSON array of events, or an object with traceEvents")
    return Trace(path, head, [event for event in events if isinstance(event, dict) and _is_sound(event)])


def _is_sound(event: Mapping[str, Any]) -> bool:
    return all(is_number(event.get(key, 0)) for key in ("ts", "dur")) and isinstance(event.get("args", {}), dict)


def is_number(value: object) -> bool:
    """Return whether it is a finite number, and no truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _parse(text: str) -> Any:
    whole = text.rstrip()
    for candidate in (text, whole.rstrip(",") + "]", whole.rpartition("\n")[0].rstrip().rstrip(",") + "]"):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(candidate)
    return None
