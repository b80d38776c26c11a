"""The estimate of memory as a table: every stage, precision and recomputation, and what fits into a limit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .memory import PRECISIONS, RECOMPUTE, STAGES, MemoryByCategory, Setting

DEGREES = ("tensor", "pipeline", "expert", "context")
"""Those that an estimate takes; the other ranks are data parallel."""


@dataclass(frozen=True)
class MemoryRow:
    """One setting and its memory."""

    setting: Setting
    memory: MemoryByCategory
    process_bytes: int = 0
    """What the process has before its model."""
    whole_bytes: int = 0
    """What it has when its whole model is made, before that is divided."""

    @property
    def total_bytes(self) -> int:
        """The peak of the process."""
        return self.process_bytes + self.memory.total_bytes

    def fits(self, limit_bytes: int) -> bool:
        """Whether a rank stays within the limit."""
        return max(self.total_bytes, self.whole_bytes) <= limit_bytes

    def to_mapping(self) -> dict[str, Any]:
        """Return the setting and all bytes by name."""
        own = {"process_bytes": self.process_bytes, "total_bytes": self.total_bytes}
        return {**self.setting._asdict(), **asdict(self.memory), **own}


@dataclass(frozen=True)
class Choice:
    """The settings that are asked about."""

    stages: Sequence[str] = STAGES
    precisions: Sequence[str] = PRECISIONS
    recompute: Sequence[str] = RECOMPUTE
    ranks_per_host: int = 8

    def without(self, failed: Collection[tuple[str, str]]) -> Choice:
        """Return the choice without precisions that failed, and recomputations that fail in one of the others."""
        precisions = [each for each in self.precisions if (each, RECOMPUTE[0]) not in failed]
        recompute = [each for each in self.recompute if all((name, each) not in failed for name in precisions)]
        return replace(self, precisions=precisions, recompute=recompute)

    def ends(self) -> list[tuple[str, str]]:
        """Return the first precision and recomputation, and the last ones."""
        return _ends(self.precisions, self.recompute)

    def lighter_ends(self) -> list[tuple[str, str]]:
        """Return the same of the precisions that go with states on a disk and with weights in few bits."""
        precisions = [each for each in self.precisions if each != "bf16-weights"]
        return _ends(precisions, self.recompute) if precisions else []


def _ends(precisions: Sequence[str], recompute: Sequence[str]) -> list[tuple[str, str]]:
    return list(dict.fromkeys([(precisions[0], recompute[0]), (precisions[-1], recompute[-1])]))


def rows_of(
    memory: Callable[[Setting], MemoryByCategory],
    choice: Choice,
    ranks: Iterable[int],
    process_bytes: int = 0,
    whole_bytes: int = 0,
) -> list[MemoryRow]:
    """Return the memory of all chosen settings on each of these numbers of ranks."""
    return [
        MemoryRow(setting, memory(setting), process_bytes, whole_bytes)
        for count in ranks
        for precision in choice.precisions
        for recompute in choice.recompute
        for stage in choice.stages
        for setting in [Setting(stage, precision, recompute, count)]
    ]
