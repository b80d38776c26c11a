"""What to do: each finding with its cost, its evidence, the fix to paste and what that should gain."""

from __future__ import annotations

from ... import diagnose
from ..content import Block, FindingBlock, Fold, Remedy, Run, Section, percent, plural, seconds

SHOWN = 3
MOST = 12


def make(run: Run) -> Section | None:
    """Return the findings, costliest first; those after the third are folded."""
    findings = run.diagnosis.findings
    if not run.timelines:
        return None
    if not findings:
        return Section("fixes", "What to do", (), "Nothing was found that costs more than noise.")
    shown: list[Block] = [_finding(finding) for finding in findings[:SHOWN]]
    rest = [_finding(finding) for finding in findings[SHOWN:MOST]]
    if rest:
        shown.append(Fold(f"{plural(len(rest), 'smaller finding')}", rest))
    return Section("fixes", "What to do", shown)


def _finding(finding: diagnose.Finding) -> FindingBlock:
    remedies = [
        Remedy(
            fix.what, fix.paste, "" if fix.gain is None else f"{seconds(fix.gain.seconds)} a step",
            "" if fix.gain is None else fix.gain.basis,
        )
        for fix in finding.fixes
    ]  # fmt: skip
    cost = f"{seconds(finding.seconds)} a step"
    return FindingBlock(
        finding.title, cost, percent(finding.share), finding.confidence, finding.evidence, remedies
    )
