"""Which cores the ranks of a machine have: by what each rank recorded, which may be the same cores or others."""

from __future__ import annotations

from collections.abc import Sequence

from ....core.vocabulary import events
from ....core.vocabulary.rank_lists import parse_numbers
from .step_table import StepTable


def rows_by_machine(table: StepTable) -> list[list[int]]:
    """Return the rows of each machine: emulated hosts of one machine share its clock, and its cores."""
    found: dict[str, list[int]] = {}
    for row, timeline in enumerate(table.records.timelines):
        found.setdefault(timeline.started.clock or timeline.host, []).append(row)
    return list(found.values())


def cores_of(table: StepTable, row: int) -> int | None:
    """Return how many cores a rank may run on."""
    timeline = table.records.timelines[row]
    cores = timeline.setup.get(events.SETUP_CORES)
    if type(cores) is int and cores > 0:
        return cores
    return max((sample.cores for sample in timeline.samples if sample.cores), default=None)


def cores_together(table: StepTable, rows: Sequence[int]) -> int | None:
    """Return how many cores some ranks of a machine may run on together.

    None: some rank did not record which they are.
    """
    every: set[int] = set()
    for row in rows:
        text = table.records.timelines[row].setup.get(events.SETUP_CORE_LIST)
        own = parse_numbers(text) if isinstance(text, str) else set()
        if not own:
            return None
        every |= own
    return len(every)
