"""What would make a model fit: each change by itself, else all together, with the memory that is needed then."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from .memory import PRECISIONS, RECOMPUTE, STAGES, MemoryByCategory, ModelFacts, Setting, memory_of

# The estimate of memory as a table: every stage, precision and recomputation, and what fits into a limit.

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


MOST_RANKS = 1024
RANKS = [2**i for i in range(MOST_RANKS.bit_length())]
"""Numbers of ranks that are looked at."""


def rank_counts_of(group: int) -> list[int]:
    """Return the numbers of ranks that are looked at where `group` ranks divide a model."""
    return [group * count for count in RANKS if group * count <= MOST_RANKS]


class WayToFit(NamedTuple):
    """A change that makes the model fit, and the memory of a rank then."""

    text: str
    total_bytes: int


def smallest_of(rows: list[MemoryRow]) -> MemoryRow:
    """Return the row that needs least; of several the one whose stage shrinks most with more ranks."""
    return min(rows, key=lambda row: (row.memory.total_bytes, row.setting.stage != "3", row.setting.stage == "0"))


def remedies(facts: ModelFacts, setting: Setting, limit_bytes: int, choice: Choice) -> list[WayToFit]:
    """Return what makes `setting`, which is over the limit, fit: single changes, or else all of them at once."""
    single = _fitting(facts, _single_changes(facts, setting), limit_bytes, choice)
    single += _fitting(facts, _more_ranks(setting), limit_bytes, choice)[:1]
    single += _smaller_batch(facts, setting, limit_bytes, choice)
    if single:
        return single
    for more_ranks, best in _more_ranks(_most_frugal(facts, setting)):
        text = f"precision {best.precision}, recompute {best.recompute} and {more_ranks}"
        total_bytes = memory_of(facts, best, ranks_per_host=choice.ranks_per_host).total_bytes
        if total_bytes <= limit_bytes:
            return [WayToFit(text, total_bytes)]
        smaller = _smaller_batch(facts, best, limit_bytes, choice)
        if smaller:
            return [WayToFit(f"{text}, and {smaller[0].text}", smaller[0].total_bytes)]
    return []


def least_possible(facts: ModelFacts, setting: Setting, choice: Choice) -> WayToFit:
    """Return the least memory that there is: every change at once, on the most ranks, without a batch."""
    best = _most_frugal(facts, setting)._replace(stage="3", ranks=MOST_RANKS)
    memory = memory_of(facts, best, ranks_per_host=choice.ranks_per_host, batch_factor=0)
    stage = f"ZeRO stage 3 on {MOST_RANKS} ranks"
    text = f"precision {best.precision}, recompute {best.recompute}, {stage}, without a batch"
    return WayToFit(text, memory.total_bytes)


def _single_changes(facts: ModelFacts, setting: Setting) -> Iterator[tuple[str, Setting]]:
    if setting.recompute != "blocks":
        yield "recompute blocks", setting._replace(recompute="blocks")
    for precision in PRECISIONS[PRECISIONS.index(setting.precision) + 1 :]:
        if precision in facts.weights:
            yield f"precision {precision}", setting._replace(precision=precision)
    for stage in STAGES[STAGES.index(setting.stage) + 1 :]:
        if stage != "hybrid" and setting.ranks > 1:
            yield f"ZeRO stage {stage}", setting._replace(stage=stage)


def _more_ranks(setting: Setting) -> list[tuple[str, Setting]]:
    return [
        (f"ZeRO stage 3 on {count} ranks", setting._replace(stage="3", ranks=count))
        for count in RANKS
        if count > setting.ranks
    ]


def _most_frugal(facts: ModelFacts, setting: Setting) -> Setting:
    precision = [precision for precision in PRECISIONS if precision in facts.weights][-1]
    return setting._replace(precision=precision, recompute=RECOMPUTE[-1])


def _fitting(
    facts: ModelFacts, changes: Iterable[tuple[str, Setting]], limit_bytes: int, choice: Choice
) -> list[WayToFit]:
    found = [
        WayToFit(text, memory_of(facts, setting, ranks_per_host=choice.ranks_per_host).total_bytes)
        for text, setting in changes
    ]
    return [remedy for remedy in found if remedy.total_bytes <= limit_bytes]


def _smaller_batch(facts: ModelFacts, setting: Setting, limit_bytes: int, choice: Choice) -> list[WayToFit]:
    """Return the largest batch that fits, in hundredths of the given one."""
    if (setting.precision, setting.recompute) not in facts.activations:
        return []
    for percent in range(99, 0, -1):
        memory = memory_of(facts, setting, ranks_per_host=choice.ranks_per_host, batch_factor=percent / 100)
        if memory.total_bytes <= limit_bytes:
            return [WayToFit(f"a batch of {percent} % of this one", memory.total_bytes)]
    return []
