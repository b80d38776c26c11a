"""Commands that can be pasted whole: the command that was run, with a change in it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....core.vocabulary.errors import PlanError
from ....core.vocabulary.run_files import RUN
from ....core.vocabulary.spec import Plan
from ...records.run_reader import RunRecords

_SIZES = ("-np", "-n", "--np", "--num-proc")
_DROPPED = ("--run-dir",)
"""Options that a second run cannot share with the first."""
_NETWORK = ("--hosts", "--slots", "--rate", "--rate-between", "--latency")
"""What makes the hosts of ``farandole emulate``."""


def command_with(
    records: RunRecords,
    settings: Mapping[str, object] | None = None,
    *,
    size: int | None = None,
    without: Sequence[str] = (),
) -> str:
    """Return the command of a run as a shell takes it, with plan keys set anew, or another number of ranks.

    `without` are flags to leave out. A run that ``torchrun`` or another launcher started gets the same script
    under ``farandole run``. A script with a plan of its own gets its line with the keys in it: it takes no other.
    """
    facts, settings = records.facts, settings or {}
    if settings and records.script_plan is not None:
        return distribute_by({**records.script_plan, **settings})
    typed = _words(facts.get("typed_command"))
    command = _words(facts.get("command")) or _script_of(records) or ["python", "train.py"]
    change = _Change(settings, size, frozenset(without))
    if typed[:2] == ["farandole", "run"]:
        words = change.of(typed, _options_end(typed, command))
    elif typed[:2] == ["farandole", "emulate"]:
        at = typed.index("farandole", 2) if "farandole" in typed[2:] else None
        end = _options_end(typed, command)
        if at is None and size is None:
            words = change.of(typed, end)
        elif at is None:
            words = [*typed[:end], "--", *change.of(["farandole", "run", "--", *_without_dashes(typed[end:])], 2)]
        else:
            words = [*typed[:at], *change.of(typed[at:], end - at)]
    else:
        words = change.of(["farandole", "run", "-np", str(size or records.size), "--", *command], 4)
    return shlex.join(words)


def doctor_line(records: RunRecords, hosts: Sequence[str]) -> str:
    """Return the line that measures the links between the hosts of a run; emulated ones have to be made again."""
    typed = _words(records.facts.get("typed_command"))
    if typed[:2] != ["farandole", "emulate"]:
        return shlex.join(["farandole", "doctor", "-H", ",".join(hosts)])
    options: list[str] = []
    script = _words(records.facts.get("command"))
    end = next((at for at, word in enumerate(typed) if word in ("--", *script[1:2])), len(typed))
    for word, following in zip(typed[2:end], [*typed[3:end], ""], strict=True):
        name, equals, _ = word.partition("=")
        options += ([word] if equals else [word, following]) if name in _NETWORK else []
    return shlex.join(["farandole", "emulate", *options, "--", "farandole", "doctor"])


def distribute_by(keys: Mapping[str, object]) -> str:
    """Return the line of Python that distributes a model by a plan of these keys."""
    values = ", ".join(f"{key}={value!r}" for key, value in keys.items())
    return f"model, optimizer = fd.distribute(model, optimizer, fd.Plan({values}))"


def is_taken(records: RunRecords, changes: Mapping[str, object]) -> bool:
    """Return whether the run's plan takes these keys; of a plan of another version nothing is known."""
    keys = {name: value for name, value in changes.items() if name in Plan.__dataclass_fields__}
    try:
        Plan.from_mapping(records.plan, where=RUN)
    except PlanError:
        return True
    try:
        Plan.from_mapping({**records.plan, **keys}, where=RUN)
    except PlanError:
        return False
    return True


@dataclass(frozen=True)
class _Change:
    """What a proposed line has other than the line that was run."""

    settings: Mapping[str, object]
    size: int | None
    without: frozenset[str]

    def of(self, words: Sequence[str], end: int) -> list[str]:
        """Return a line of ``farandole run``; its options are the words before `end`."""
        kept: list[str] = []
        rest = list(words[2:end])
        while rest:
            word = rest.pop(0)
            name, equals, value = word.partition("=")
            following = 0 if equals or not rest else 1
            key = (value or "".join(rest[:following])).partition("=")[0] if name == "--set" else None
            if name in _DROPPED or (name in _SIZES and self.size is not None) or key in self.settings:
                del rest[:following]
            elif word not in self.without:
                kept.append(word)
        sized = [] if self.size is None else ["-np", str(self.size)]
        chosen = [part for key, value in self.settings.items() for part in ("--set", f"{key}={_text(value)}")]
        return [*words[:2], *sized, *kept, *chosen, *words[end:]]


def _options_end(words: Sequence[str], command: Sequence[str]) -> int:
    """Return where the options of a typed line end: at its ``--``, or where the script's command begins."""
    tail = len(command) - 1  # the first word, Python, may have been found for the user
    begin = len(words) - tail
    for at in (begin - 2, begin - 1):
        if at > 1 and words[at] == "--":
            return at
    return begin - 1 if begin > 3 and "python" in words[begin - 1] else begin


def _without_dashes(words: Sequence[str]) -> Sequence[str]:
    return words[1:] if words[:1] == ["--"] else words


def _script_of(records: RunRecords) -> list[str]:
    """Return the command of rank 0, as the rank itself recorded it."""
    for timeline in records.timelines:
        text = timeline.setup.get("arguments")
        if isinstance(text, str):
            try:
                return shlex.split(text)
            except ValueError:
                return []
    return []


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _words(value: Any) -> list[str]:
    return [str(word) for word in value] if isinstance(value, list) and value else []
