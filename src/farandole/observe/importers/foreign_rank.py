"""What a reader of another tool's trace finds of one rank, before it is put on one clock with the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...core.vocabulary.events import Exchange, Phase


@dataclass(frozen=True)
class ForeignStep:
    """One step; times in seconds of the file's own zero."""

    step: int
    begin_seconds: float
    end_seconds: float
    phases: tuple[Phase, ...] = ()
    exchanges: tuple[Exchange, ...] = ()


@dataclass
class ForeignRank:
    """One file."""

    path: Path
    rank: int
    size: int | None
    """Ranks of the job, where the file says it."""
    host: str
    epoch_seconds: float | None
    """Wall time of the file's zero, where it says it."""
    begin_seconds: float
    """Start of the first step, since the file's zero."""
    steps: Sequence[ForeignStep]
    """At least one."""
    notes: list[str] = field(default_factory=list)
    """What is missing or was guessed, in words."""
