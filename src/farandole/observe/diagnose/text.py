"""A diagnosis on one screen: at most 100 columns, the verdict first, then the step, then what to do."""

from __future__ import annotations

import textwrap

from ...core.vocabulary.events import UNDIVIDED
from ...core.vocabulary.units import format_seconds, format_share
from .finders.finding import Diagnosis, Finding

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
    lines = _wrap(diagnosis.verdict)
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
        lines += _wrap(f"note: {note}", "      ")
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
    lines = _wrap(f"{number}. [{finding.kind}] {finding.title}", "   ")
    for evidence in finding.evidence[:most]:
        lines += _wrap(f"   why: {evidence}", "        ")
    for fix in finding.fixes[:most]:
        gain = f" (saves about {format_seconds(fix.gain.seconds)})" if fix.gain is not None else ""
        lines += _wrap(f"   fix: {fix.what}{gain}", "        ")
        if fix.paste:
            lines += [f"          {line}" for line in fix.paste.splitlines()]
    for fix in finding.fixes[most : most + _SHORT] if whole else ():
        gain = f" (saves about {format_seconds(fix.gain.seconds)})" if fix.gain is not None else ""
        lines += _wrap(f"   or: {fix.what}{gain}: see --json", "       ")
    return lines


def printable(text: str) -> str:
    """Return a text without terminal control characters: names in records are not trusted."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _wrap(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(printable(text), WIDTH, subsequent_indent=indent, break_long_words=True) or [""]
