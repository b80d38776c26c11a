"""A strict reader of the Trace Event Format, for tests: what a viewer may assume of a file must hold.

Checked: JSON; an array of objects; the fields each phase requires, and no others; begin and end nest in each
process and only whole operations contain phases; time never runs back in a process; every process is named
once, before its first event.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Trace = list[dict[str, Any]]

REQUIRED = {
    "M": {"name", "ph", "pid", "args"},
    "B": {"name", "ph", "pid", "ts"},
    "E": {"ph", "pid", "ts"},
    "X": {"name", "ph", "pid", "ts", "dur"},
    "i": {"name", "ph", "pid", "ts", "s"},
}
OPTIONAL = {"M": set[str](), "B": set[str](), "E": {"args"}, "X": set[str](), "i": {"args"}}


def check(path: Path, *, ended: bool = True) -> Trace:
    """Return the events of the file; with `ended`, nothing may still be open, the array included."""
    text = path.read_text(encoding="utf-8")
    events: Trace = json.loads(text if ended or text.endswith("]\n") else text + "]")
    assert isinstance(events, list)
    stacks: dict[int, list[str]] = defaultdict(list)
    times: dict[int, float] = defaultdict(float)
    names: dict[int, str] = {}
    for number, event in enumerate(events):
        where = f"event {number} {event}"
        phase = event["ph"]
        assert REQUIRED[phase] <= set(event) <= REQUIRED[phase] | OPTIONAL[phase], where
        process = event["pid"]
        assert type(process) is int, where
        assert type(event.get("name", "")) is str, where
        if phase == "M":
            _check_metadata(event, names, where)
            continue
        assert process in names, f"{where}: its process has no name yet"
        assert type(event["ts"]) in (int, float), where
        assert event["ts"] >= times[process], f"{where}: before {times[process]}"
        times[process] = event["ts"] + event.get("dur", 0)
        if phase == "B":
            stacks[process].append(event["name"])
            assert len(stacks[process]) <= 2, f"{where} in {stacks[process]}"
        elif phase == "E":
            assert stacks[process], f"{where}: ends what has not begun"
            stacks[process].pop()
        elif phase == "i":
            assert event["s"] in ("g", "p", "t"), where
    left = {names[process]: stack for process, stack in stacks.items() if stack}
    assert not (ended and left), f"never ended: {left}"
    return events


def _check_metadata(event: dict[str, Any], names: dict[int, str], where: str) -> None:
    arguments = event["args"]
    if event["name"] == "process_name":
        assert event["pid"] not in names, f"{where}: named twice"
        assert type(arguments["name"]) is str, where
        names[event["pid"]] = arguments["name"]
    else:
        assert event["name"] == "process_sort_index", where
        assert type(arguments["sort_index"]) is int, where


def names(events: Trace) -> dict[str, int]:
    """Return the processes by name, without those that stand for a rank."""
    named = [event for event in events if event["ph"] == "M" and event["name"] == "process_name"]
    found = {event["args"]["name"]: event["pid"] for event in named}
    return {name: process for name, process in found.items() if not name.startswith("rank ")}


def lane(events: Trace, name: str) -> Trace:
    """Return the events of one named operation."""
    process = names(events)[name]
    return [event for event in events if event["pid"] == process and event["ph"] != "M"]
