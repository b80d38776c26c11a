"""A finding of the doctor: what is wrong, why it matters, and the command that fixes it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

Severity = Literal["problem", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("problem", "warning", "note")


@dataclass(frozen=True)
class ClusterFinding:
    """One thing to know. A problem keeps jobs from running well, a warning may, a note does not."""

    what: str
    why: str
    fix: str
    """A line to paste, or to act on."""
    severity: Severity = "problem"
    host: str = ""
    """Where to paste it; empty: it is about several hosts."""

    def to_mapping(self) -> dict[str, str]:
        """Return it as plain values."""
        return asdict(self)


Findings = Iterable[ClusterFinding]
"""What a check returns: it may be a generator."""


def worst_first(findings: Findings) -> list[ClusterFinding]:
    """Return the findings, problems before warnings before notes, otherwise in their order."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
