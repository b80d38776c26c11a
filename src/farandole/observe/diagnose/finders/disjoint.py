"""Costs beside each other: no second of a step is in two of them.

[Note: findings are disjoint] A step is the work of its latest rank and the exchange behind it. Exposed
communication is the exchange and nothing else. In the work, data that all wait for, lateness, pauses and spikes
are different seconds because each finder leaves out what those before it explained: jitter leaves out stragglers,
pauses and spikes; spikes leave out pauses, and what is exchange or data already; a shared core counts while
its rank computes, and what it loses in the exchange is in the exchange's cost; launches leave out shared cores.
Costs estimated from rates of the host come last and get at most the time that the others leave. A slow
start is spread over all steps and lies outside of the mean step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..facts.evidence import LEAST_SHARE, format_cost
from ..facts.finding import Finding

OUTSIDE = frozenset({"warm-up"})
"""Kinds whose cost is no part of the mean step."""


def make_disjoint(findings: Sequence[Finding], step_seconds: float) -> list[Finding]:
    """Return the findings, surest first, with costs that together fit into a step.

    `findings` are in the order of how sure their costs are. A finding that keeps less than the least share
    is dropped. See [Note: findings are disjoint].
    """
    left = step_seconds
    kept = []
    for finding in findings:
        if finding.kind in OUTSIDE:
            kept.append(finding)
            continue
        seconds = min(finding.seconds, left)
        if seconds < LEAST_SHARE * step_seconds:
            continue
        left -= seconds
        kept.append(scaled_to(finding, seconds / finding.seconds))
    return kept


def scaled_to(finding: Finding, part: float) -> Finding:
    """Return a finding at a part of its cost, its title and its gains with it."""
    if part == 1.0:
        return finding
    seconds, share = part * finding.seconds, part * finding.share
    fixes = tuple(
        replace(fix, gain=None if fix.gain is None else replace(fix.gain, seconds=part * fix.gain.seconds))
        for fix in finding.fixes
    )
    title = finding.title.replace(format_cost(finding.seconds, finding.share), format_cost(seconds, share))
    return replace(finding, title=title, seconds=seconds, share=share, fixes=fixes)
