"""What a diagnosis says, as data: findings with their cost, the fix to paste, and what it should gain.

`KINDS` are stable names, so that scripts can ask for them. Seconds are seconds of one step; shares are shares of
the mean step.
"""

from __future__ import annotations

import json
import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.run_files import RUN
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.units import format_seconds, format_share
from ..records.run_reader import RunRecords

# When a difference is more than noise, and how numbers are put into words.

LEAST_SHARE = 0.02
"""Fraction of a step; a smaller cost is not a finding."""
_SURE = 5.0
"""Standard errors by which a median must differ from 0; ten ranks and as many phases are tried at a time."""
_FEW = 5
"""With fewer steps than this nothing is certain."""

SHOWN_RANKS = 4
"""Most ranks that a finding's title lists; it counts the others."""


def stands_out(differences: Sequence[float]) -> bool:
    """Return whether the median of paired differences is above 0 by more than chance."""
    if not differences:
        return False
    middle = statistics.median(differences)
    if middle <= 0:
        return False
    if len(differences) < _FEW:
        return min(differences) > 0
    spread = 1.4826 * statistics.median([abs(d - middle) for d in differences])
    above = sum(d > 0 for d in differences) / len(differences)
    return above >= 0.75 and middle > _SURE * 1.25 * spread / math.sqrt(len(differences))


def confidence(steps: int) -> Confidence:
    """Return how much so many steps are worth."""
    return "high" if steps >= 20 else "medium" if steps >= _FEW else "low"


def format_cost(seconds: float, share: float) -> str:
    """Return a cost as text: ``50.3 ms a step (31%)``."""
    return f"{format_seconds(seconds)} a step ({format_share(share)})"


Confidence = Literal["high", "medium", "low"]

KINDS: Mapping[str, str] = {
    "communication": "the exchange of gradients is not hidden behind computing",
    "small-buckets": "the buckets are so small that their rounds cost more than their bytes",
    "large-buckets": "the last bucket leaves so late that nothing hides it",
    "slow-link": "one host's link is slower than the others'",
    "absent": "ranks wait for the network, or for ranks that left no events",
    "extra-exchange": "gradients are exchanged more often, or more of them, than a step needs",
    "straggler": "one rank, or the ranks of one host, are later than the others in every step",
    "jitter": "ranks are late in different steps",
    "samples": "ranks have unequal numbers of samples",
    "input": "all ranks wait for their data",
    "oversubscribed": "a rank's core is used by something else too",
    "memory": "memory runs short: swapping, or an accelerator's allocator at its limit",
    "launch": "the accelerator waits for the host to launch its many small operations",
    "gc": "Python's garbage collection pauses ranks",
    "pause": "checkpoints, evaluation or something else regularly stops the steps",
    "irregular": "some steps take far longer than the rest",
    "warm-up": "the first steps are far slower than the rest",
    "crowded": "more ranks than cores",
    "threads": "a rank has more threads than cores",
    "other": "the script's own code between the phases takes much of a step",
    "optimizer": "the optimizer goes through many small parameters one by one",
    "experts": "experts of a mixture get unequal numbers of tokens, and ranks wait for those that get most",
    "bubble": "ranks of a pipeline wait because of its schedule and its number of micro-batches",
    "slow-stage": "one stage of a pipeline takes longer than the others, and all wait for it",
    "pipeline-communication": "ranks of a pipeline wait longer than schedule and stages explain",
    "tensor-communication": "ranks that share layers wait for the activations that they exchange",
    "context-communication": "ranks that share sequences wait for keys and values",
    "expert-communication": "tokens that travel to experts and back are waited for",
    "shard-communication": "stepped parameters that travel to all ranks are waited for",
    "rows-communication": "rows that travel to servers and back are waited for",
    "loss-communication": "the mean loss that fd.step returns is waited for",
    "small-batch": "the batch is so small that work which does not depend on it is much of a step",
}
"""Every kind of finding, and what it means."""
OUTSIDE = frozenset({"warm-up"})
"""Kinds whose cost is no part of the mean step: they bind no run, and are facts beside its verdict."""


@dataclass(frozen=True)
class Gain:
    """The predicted saving of a fix, and how it is estimated."""

    seconds: float
    """Seconds per step."""
    basis: str
    """The formula in words, with its numbers."""


@dataclass(frozen=True)
class Fix:
    """Something to do about a finding."""

    what: str
    """One sentence."""
    paste: str = ""
    """Text to paste: a command, lines of Python or a key of the plan. Empty when there is none."""
    gain: Gain | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    """What it changes: plan keys, or facts as in a `Setup`. So `compare` knows whether it was done."""


@dataclass(frozen=True)
class Finding:
    """Something that costs time, with its cost."""

    kind: str
    """One of `KINDS`."""
    title: str
    """What is the matter and what it costs: one sentence."""
    seconds: float
    """Its cost: seconds of each step."""
    share: float
    """The same as a share of the mean step, 0 to 1."""
    ranks: tuple[int, ...] = ()
    """Whom it is about; empty: all."""
    hosts: tuple[str, ...] = ()
    phase: str = ""
    """Where in the step it is: one of `core.vocabulary.events.STEP_PHASES`, another phase's name, or empty."""
    evidence: tuple[str, ...] = ()
    fixes: tuple[Fix, ...] = ()
    """The one that should gain most first."""
    confidence: Confidence = "high"


@dataclass(frozen=True)
class Diagnosis:
    """What was found out about a run."""

    name: str
    bound: str
    """One of `BOUNDS`."""
    verdict: str
    """One sentence with its cost."""
    confidence: Confidence
    size: int = 0
    steps: int = 0
    """Steps of the run, warm-up included."""
    steps_looked_at: int = 0
    step_seconds: float | None = None
    """Mean over the steps looked at. None: nothing was recorded."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a step by part, mean over ranks: phases, ``communication``, ``waiting``; together the step."""
    hidden_seconds: float = 0.0
    """Seconds of a step in which computing hides communication. Not one of the parts."""
    findings: tuple[Finding, ...] = ()
    """Costliest first."""
    notes: tuple[str, ...] = ()
    """What is missing and what it means, in words."""

    def to_mapping(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {"version": 1, **asdict(self)}

    def worst_share(self) -> float:
        """Return the largest share of a step that a finding costs; 0 without findings. A slow start is in none."""
        return max((finding.share for finding in self.findings if finding.kind not in OUTSIDE), default=0.0)


# Commands that can be pasted whole: the command that was run, with a change in it.


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
