"""Ranks that all wait for their data; one that waits alone is a straggler."""

from __future__ import annotations

import statistics

from ....core.vocabulary.events import DATA
from ....core.vocabulary.units import format_seconds
from ...figures.figures import low_median, mean
from ..facts.evidence import LEAST_SHARE, format_cost
from ..facts.finding import Finding
from ..facts.step_table import StepTable
from .loader_fixes import loader_facts, loader_fixes


def find_input(table: StepTable) -> list[Finding]:
    """Find ranks that all wait for their data."""
    seconds = mean([low_median([cell.phases.get(DATA, 0.0) for cell in cells]) for cells in table.by_step()])
    share = seconds / table.step_seconds
    if share < LEAST_SHARE:
        return []
    medians = [statistics.median([cell.phases.get(DATA, 0.0) for cell in own]) for own in table.cells]
    facts = loader_facts(table, range(len(table.cells)), seconds)
    reasons, fixes = loader_fixes(facts)
    by_rank = (
        f"data wait by rank: {format_seconds(min(medians))} to {format_seconds(max(medians))} a step (median)"
    )
    who = "all ranks wait" if len(medians) > 1 else "the rank waits"
    what = "data, which costs CPU time" if facts.is_cpu_work else "data"
    title = f"{who} for {what}: {format_cost(seconds, share)}"
    return [
        Finding(
            "input", title, seconds, share, phase=DATA, evidence=(*reasons, by_rank), fixes=tuple(fixes)
        )
    ]  # fmt: skip
