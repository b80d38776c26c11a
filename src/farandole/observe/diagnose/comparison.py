"""What changed between two runs: plan, environment, where a step's time goes, and the loss, with intervals.

[Note: intervals of blocks] Steps near in time resemble each other, so the run is cut into up to fifty stretches of
steps and the means of these are drawn anew, not the steps. The interval covers chance within the two runs; what
differs from start to start (placement, neighbours on the machine) only more runs would show.
"""

from __future__ import annotations

import math
import random
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ...core.vocabulary.events import UNDIVIDED
from ...core.vocabulary.units import format_seconds, format_share, parse_bytes
from ..figures.figures import mean
from ..figures.inexact import codec_of, sync_of
from ..figures.prediction_check import PredictionCheck, check_prediction
from ..figures.summary import NOT_SEEN, weighted_loss
from ..records.run_reader import RunRecords, read_run
from .finding import Diagnosis, Finding
from .step_table import RankStep, StepTable, bucket_bytes_of, make_step_table
from .verdict import diagnose_records

_DRAWS = 1000
_BLOCKS = 50
_LEAST_STEPS = 8
_LEAST_CHANGE = 0.01
"""Fraction of a step; smaller changes are not reported, even if they are significant."""
_ALIKE = 0.05
_LAST_PART = 0.2
_FACTS = ("commit", "cores", "size", "congestion_control")
"""Fraction of the steps with a finite loss; the loss is the mean over these last ones."""

Outcome = Literal["faster", "slower", "no difference", "unknown"]


_WHAT_CAME = {
    "no difference": "no difference beyond noise came of it",
    "unknown": "too few steps tell what it saved",
}


@dataclass(frozen=True)
class Change:
    """A figure in both runs, and its 95 % interval of the difference (second less first)."""

    name: str
    first: float
    second: float
    interval: tuple[float, float]

    @property
    def difference(self) -> float:
        """Second less first."""
        return self.second - self.first

    @property
    def is_certain(self) -> bool:
        """Whether the interval is off 0."""
        return self.interval[0] > 0 or self.interval[1] < 0


@dataclass(frozen=True)
class Promise:
    """A fix that was proposed for the first run and was applied in the second, and what came of it."""

    what: str
    promised_seconds: float
    """Predicted saving, a step."""
    saved_seconds: float
    """By how much a step became shorter, whatever else was changed."""


@dataclass(frozen=True)
class Comparison:
    """Two runs beside each other."""

    first: str
    second: str
    outcome: Outcome
    verdict: str
    step: Change | None = None
    sample: Change | None = None
    """The time of a step over its samples, where the runs have other numbers of samples in a step."""
    parts: tuple[Change, ...] = ()
    loss: Change | None = None
    plan: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    environment: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    promises: tuple[Promise, ...] = ()
    """Fixes that the diagnosis of the first run proposed and the second run has."""
    predictions: tuple[PredictionCheck | None, ...] = (None, None)
    """What the plan of each run predicted, beside what was measured; None: it predicted nothing."""
    notes: tuple[str, ...] = ()

    def to_mapping(self) -> dict[str, Any]:
        """Return everything as plain values."""
        checks = [None if check is None else check.to_mapping() for check in self.predictions]
        return {"version": 1, **asdict(self), "predictions": checks}

    def to_text(self) -> str:
        """Return the comparison for a terminal, at most 100 columns wide."""
        lines = _wrap(self.verdict)
        if self.step is not None:
            lines += ["", f"{'':<26}{'A':>12}{'B':>12}{'B - A':>12}   95% interval"]
            first = [self.step, *([] if self.sample is None else [self.sample])]
            lines += [_row(change, format_seconds) for change in (*first, *self.parts)]
            if self.loss is not None:
                lines.append(_row(self.loss, lambda value: f"{value:.4g}"))
        for promise in self.promises:
            promised, saved = format_seconds(promise.promised_seconds), format_seconds(promise.saved_seconds)
            came = _WHAT_CAME.get(self.outcome, f"it saved {saved}")
            text = f"promised for A: {promise.what}: saves about {promised} a step; {came}"
            lines += _wrap(text, "    ")
        for label, check in zip("AB", self.predictions, strict=True):
            if check is not None:
                lines += ["", f"predicted against measured, {label}:", *check.to_lines()]
        for title, values in (("plan", self.plan), ("environment", self.environment)):
            for key, (one, other) in values.items():
                lines += _wrap(f"{title}: {key}: {one} -> {other}", "    ")
        for note in self.notes:
            lines += _wrap(f"note: {note}", "      ")
        return "\n".join(lines)


def compare(first: Path, second: Path) -> Comparison:
    """Say what changed from one run to another. Raises `DataError` for a directory that is none of a run."""
    one, other = (read_run(run, for_diagnosis=True) for run in (first, second))
    names = (one.name, other.name) if one.name != other.name else (str(first), str(second))
    notes = [
        f"{label}: {note}" for label, records in zip("AB", (one, other), strict=True) for note in records.notes
    ]
    plan = _differences(*({**records.plan, "predicted": None} for records in (one, other)))
    environment = _differences(_environment(one), _environment(other))
    tables = [make_step_table(records) if records.timelines else None for records in (one, other)]
    a, b = tables
    if a is None or b is None or not a.steps or not b.steps:
        verdict = "Nothing to compare: " + " and ".join(
            f"{name} recorded no step"
            for name, table in zip(names, tables, strict=True)
            if not table or not table.steps
        )
        return Comparison(*names, "unknown", verdict + ".", plan=plan, environment=environment, notes=tuple(notes))
    if one.size != other.size:
        notes.append(f"A ran on {one.size} ranks and B on {other.size}: their steps are not the same work")
    notes += [f"{label}: {text}" for label, table in zip("AB", (a, b), strict=True) if (text := _unseen(table))]
    step = _change("step", _lengths(a), _lengths(b))
    sample = _of_samples(a, b)
    parts = tuple(
        _change(name, _part(a, name), _part(b, name))
        for name in _part_names(a, b)
        if max(mean(_part(a, name)), mean(_part(b, name))) > 0.005 * max(step.first, step.second)
    )
    loss = _loss(a, b)
    outcome, verdict = _judge(names, step if sample is None else sample, parts, min(len(a.steps), len(b.steps)))
    if loss is not None and loss.is_certain and loss.difference > 0 and _saw_as_much(a, b):
        verdict += f" Its loss is higher: {loss.second:.4g} instead of {loss.first:.4g} over the last fifth."
    elif loss is None and (sync_of(one), codec_of(one)) != (sync_of(other), codec_of(other)):
        which = " and ".join(label for label, table in zip("AB", (a, b), strict=True) if not _last_losses(table))
        notes.append(f"{which} logged no losses: fd.log(loss=loss) lets these two be compared by what they learn")
    saved = step.first - step.second if sample is None else (sample.first - sample.second) * _samples(a)
    promises = promises_kept(one, other, saved)
    predictions = tuple(check_prediction(records) for records in (one, other))
    return Comparison(
        *names, outcome, verdict, step, sample, parts, loss, plan, environment, promises, predictions, tuple(notes)
    )  # fmt: skip


def promises_kept(first: RunRecords, second: RunRecords, saved_seconds: float) -> tuple[Promise, ...]:
    """Return the proposals for the first run that the second has and the first had not, largest first."""
    before, after = _settings(first), _settings(second)
    kept = [
        Promise(fix.what, fix.gain.seconds, saved_seconds)
        for finding in diagnose_records(first).findings
        for fix in finding.fixes
        if fix.gain is not None
        and fix.changes
        and all(
            _is_set(after, key, value) and not _is_set(before, key, value) for key, value in fix.changes.items()
        )
    ]
    return tuple(sorted(kept, key=lambda promise: -promise.promised_seconds))


def _settings(records: RunRecords) -> dict[str, Any]:
    setup = records.timelines[0].setup if records.timelines else {}
    return {**setup, **records.plan}


def _is_set(settings: Mapping[str, Any], key: str, value: object) -> bool:
    """Whether a run has a setting; of bytes, in whatever unit."""
    own = settings.get(key)
    if key == "bucket_bytes" and isinstance(own, int):
        return bucket_bytes_of(settings, settings) == parse_bytes(str(value))
    return str(own).lower() == str(value).lower()


def _judge(names: tuple[str, str], step: Change, parts: Sequence[Change], steps: int) -> tuple[Outcome, str]:
    share = step.difference / step.first if step.first > 0 else 0.0
    between = f"{_signed(step.interval[0])} to {_signed(step.interval[1])}"
    if steps < _LEAST_STEPS:
        return (
            "unknown",
            f"Too few steps to compare: {steps} after the warm-up, at least {_LEAST_STEPS} are needed.",
        )
    if not step.is_certain or abs(share) < _LEAST_CHANGE:
        return "no difference", (
            f"No difference beyond noise: a {step.name} takes {format_seconds(step.first)} in {names[0]} and "
            f"{format_seconds(step.second)} in {names[1]} (difference {between}, 95% interval)."
        )
    word: Outcome = "faster" if step.difference < 0 else "slower"
    times = f"{format_seconds(step.second)} instead of {format_seconds(step.first)} a {step.name}"
    text = (
        f"{names[1]} is {word} than {names[0]}: {times}, {format_share(abs(share))} "
        f"(difference {between}, 95% interval)"
    )
    same_way = [p for p in parts if p.is_certain and p.difference * step.difference > 0]
    if same_way and step.name == "step":
        most = max(same_way, key=lambda part: abs(part.difference))
        text += f", most of it in {most.name} ({_signed(most.difference)})"
    return word, text + "."


def _wrap(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(printable(text), WIDTH, subsequent_indent=indent)


def _signed(seconds: float) -> str:
    return ("+" if seconds >= 0 else "") + format_seconds(seconds)


def _row(change: Change, show: Any) -> str:
    low, high = change.interval
    sure = " *" if change.is_certain else ""

    def signed(value: float) -> str:
        return f"{'+' if value >= 0 else ''}{show(value)}"

    return (
        f"{printable(change.name)[:25]:<26}{show(change.first):>12}{show(change.second):>12}{signed(change.difference):>12}"
        f"   {signed(low)} to {signed(high)}{sure}"
    )


def _change(name: str, first: Sequence[float], second: Sequence[float]) -> Change:
    return Change(name, mean(first), mean(second), difference_interval(first, second))


def difference_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of mean(second) - mean(first). See [Note: intervals of blocks]."""
    draw = random.Random(0)
    one, other = _blocks(first), _blocks(second)
    drawn = sorted(
        mean(draw.choices(other, k=len(other))) - mean(draw.choices(one, k=len(one))) for _ in range(_DRAWS)
    )
    return drawn[int(0.025 * _DRAWS)], drawn[int(0.975 * _DRAWS) - 1]


def _blocks(values: Sequence[float]) -> list[float]:
    count = min(_BLOCKS, max(1, len(values) // 2))
    return [mean(values[len(values) * i // count : len(values) * (i + 1) // count]) for i in range(count)]


def _lengths(table: StepTable) -> list[float]:
    """Return the step lengths, the mean over the ranks: as in the summary and the diagnosis."""
    return [mean([cell.length for cell in cells]) for cells in table.by_step()]


def _samples(table: StepTable) -> float:
    """Return the samples of a step, over all ranks: the mean."""
    return mean([float(sum(cell.samples for cell in cells)) for cells in table.by_step()])


def _saw_as_much(a: StepTable, b: StepTable) -> bool:
    """Return whether both runs trained on about as many samples; on as many steps where these are not known."""
    one, other = (max(r.step_count for r in table.records.timelines) * (_samples(table) or 1) for table in (a, b))
    return abs(one - other) <= _ALIKE * one


def _of_samples(a: StepTable, b: StepTable) -> Change | None:
    """Return the time of a sample in both runs; None where a step has as many in both, or that is not known."""
    one, other = _samples(a), _samples(b)
    if not one or not other or abs(one - other) < _LEAST_CHANGE * one:
        return None
    return _change("sample", [each / one for each in _lengths(a)], [each / other for each in _lengths(b)])


def _part(table: StepTable, name: str) -> list[float]:
    return [mean([_value(cell, name) for cell in cells]) for cells in table.by_step()]


def _value(cell: RankStep, name: str) -> float:
    if name in ("communication", "waiting"):
        return float(getattr(cell, name))
    return cell.phases.get(name, 0.0)


def _part_names(a: StepTable, b: StepTable) -> list[str]:
    exchanges = ["communication", "waiting"] if _unseen(a) == _unseen(b) == "" else []
    return list(dict.fromkeys([*a.phase_names(), *b.phase_names(), *exchanges]))


def _unseen(table: StepTable) -> str:
    """Say that communication is unknown, where several ranks exchange gradients in a way that was not seen."""
    return "" if len(table.rows) < 2 or table.sees_exchanges else NOT_SEEN


def _loss(a: StepTable, b: StepTable) -> Change | None:
    one, other = (_last_losses(table) for table in (a, b))
    return _change("loss, last fifth", one, other) if one and other else None


def _last_losses(table: StepTable) -> list[float]:
    by_step = []
    for rows in zip(*table.rows, strict=True):
        values = [(row.loss, row.samples) for row in rows if row.loss is not None and math.isfinite(row.loss)]
        if values:
            by_step.append(weighted_loss(values))
    return by_step[-max(1, round(_LAST_PART * len(by_step))) :] if by_step else []


def _environment(records: RunRecords) -> dict[str, Any]:
    facts = records.facts
    found: dict[str, Any] = {key: facts.get(key) for key in _FACTS if key in facts}
    if isinstance(facts.get("command"), list):
        found["command"] = " ".join(str(word) for word in facts["command"])
    versions = facts.get("versions")
    if isinstance(versions, dict):
        found |= {str(key): value for key, value in versions.items()}
    found["hosts"] = ", ".join(dict.fromkeys(rank.host for rank in records.timelines))
    return found


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    keys = dict.fromkeys([*one, *other])
    return {key: (one.get(key), other.get(key)) for key in keys if one.get(key) != other.get(key)}


# A diagnosis on one screen: at most 100 columns, the verdict first, then the step, then what to do.


WIDTH = 100
HEIGHT = 40
"""Lines; the costliest finding is shown completely even if it needs more."""
_BAR = 40
_SHOWN = 4
_NOTES = 4
_SHORT = 2
"""Fixes of the costliest finding that are named beside those that are shown."""


def to_text(diagnosis: Diagnosis) -> str:
    """Return a diagnosis for a terminal."""
    lines = _wrapped(diagnosis.verdict)
    if diagnosis.step_seconds:
        lines += ["", *_parts(diagnosis)]
    notes = _notes(diagnosis)
    room = HEIGHT - len(lines) - len(notes) - len(["", "more"])
    shown = 0
    for number, finding in enumerate(diagnosis.findings[:_SHOWN], start=1):
        block = ["", *_finding(number, finding, whole=number == 1)]
        room -= len(block)
        if room < 0 < shown:
            break
        lines += block
        shown = number
    more = len(diagnosis.findings) - shown
    if more > 0:
        lines += ["", f"{more} more finding{'s' * (more != 1)} that cost{'s' * (more == 1)} less: see --json"]
    return "\n".join(lines + notes)


def _notes(diagnosis: Diagnosis) -> list[str]:
    lines = [""] if diagnosis.notes else []
    for note in diagnosis.notes[:_NOTES]:
        lines += _wrapped(f"note: {note}", "      ")
    if len(diagnosis.notes) > _NOTES:
        lines.append(f"note: and {len(diagnosis.notes) - _NOTES} more notes: see --json")
    return lines


def _parts(diagnosis: Diagnosis) -> list[str]:
    total = diagnosis.step_seconds or 1.0
    ranks = f"{diagnosis.size} rank{'s' * (diagnosis.size != 1)}"
    looked = f"{diagnosis.steps_looked_at} of {diagnosis.steps} steps looked at"
    lines = [f"step of {format_seconds(total)}, mean of {ranks}, {looked}, confidence {diagnosis.confidence}"]
    for name, seconds in diagnosis.parts.items():
        share = seconds / total
        label = printable(_LABELS.get(name, name))
        if share >= 0.005:
            bar = "#" * max(1, round(share * _BAR))
            lines.append(f"  {label[:26]:<26} {format_seconds(seconds):>9} {format_share(share):>6}  {bar}")
    if diagnosis.hidden_seconds > 0.005 * total:
        hidden = format_seconds(diagnosis.hidden_seconds)
        lines.append(f"  {'hidden communication':<26} {hidden:>9}         behind computing")
    return lines


_LABELS = {
    "communication": "exposed communication",
    "waiting": "waiting for others",
    "data": "data loading",
    UNDIVIDED: "computing or data loading",
}


def _finding(number: int, finding: Finding, *, whole: bool) -> list[str]:
    """Return a finding; of one that is not `whole`, the first reason and the first fix."""
    most = 2 if whole else 1
    lines = _wrapped(f"{number}. [{finding.kind}] {finding.title}", "   ")
    for evidence in finding.evidence[:most]:
        lines += _wrapped(f"   why: {evidence}", "        ")
    for fix in finding.fixes[:most]:
        gain = f" (saves about {format_seconds(fix.gain.seconds)})" if fix.gain is not None else ""
        lines += _wrapped(f"   fix: {fix.what}{gain}", "        ")
        if fix.paste:
            lines += [f"          {line}" for line in fix.paste.splitlines()]
    for fix in finding.fixes[most : most + _SHORT] if whole else ():
        gain = f" (saves about {format_seconds(fix.gain.seconds)})" if fix.gain is not None else ""
        lines += _wrapped(f"   or: {fix.what}{gain}: see --json", "       ")
    return lines


def printable(text: str) -> str:
    """Return a text without terminal control characters: names in records are not trusted."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(printable(text), WIDTH, subsequent_indent=indent, break_long_words=True) or [""]
