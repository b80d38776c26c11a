"""Ranks that all wait for their data; one that waits alone is a straggler."""

from __future__ import annotations

import statistics

from ....core.vocabulary.events import DATA
from ....core.vocabulary.units import format_seconds
from ...figures.figures import low_median, mean
from ..facts.evidence import LEAST_SHARE, format_cost
from ..facts.finding import Finding, Fix, Gain
from ..facts.step_table import StepTable


def find_input(table: StepTable) -> list[Finding]:
    """Find ranks that all wait for their data."""
    seconds = mean([low_median([cell.phases.get(DATA, 0.0) for cell in cells]) for cells in table.by_step()])
    share = seconds / table.step_seconds
    if share < LEAST_SHARE:
        return []
    medians = [statistics.median([cell.phases.get(DATA, 0.0) for cell in own]) for own in table.cells]
    evidence = (
        f"data wait by rank: {format_seconds(min(medians))} to {format_seconds(max(medians))} a step (median)",
    )
    fixes = (
        Fix(
            "load batches in processes of their own, ahead of time",
            "DataLoader(..., num_workers=4, prefetch_factor=4, persistent_workers=True)",
            Gain(seconds, "all of the wait, if the workers keep up with the step"),
        ),
        Fix("do less for a sample: decode and resize once, and keep the result"),
    )
    who = "all ranks wait" if len(medians) > 1 else "the rank waits"
    title = f"{who} for data: {format_cost(seconds, share)}"
    return [Finding("input", title, seconds, share, phase=DATA, evidence=evidence, fixes=fixes)]
