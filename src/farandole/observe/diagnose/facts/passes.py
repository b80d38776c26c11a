"""Backward passes and optimizer steps of a step, and how a loop comes to fewer exchanges for the same samples.

[Note: what accumulate changes] The plan key `accumulate` joins the exchanges of passes that the loop makes before
its optimizer steps. It does nothing for a loop that steps after each pass: there batches have to grow, or the loop
has to step less often.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ....core.vocabulary import events
from ....core.vocabulary.events import BACKWARD, OPTIMIZER
from ....core.vocabulary.spec import Plan
from ...figures.inexact import sync_of
from .finding import Fix, Gain
from .proposals import command_with
from .step_table import StepTable

_STEP = "optimizer.step()\n    optimizer.zero_grad()  # here alone"


def passes_of(table: StepTable) -> int:
    """Return the usual number of backward passes in a step; 0 where passes were not recorded."""
    return _usual(table, BACKWARD)


def optimizer_steps_of(table: StepTable) -> int:
    """Return how many optimizers usually step in a step; at least 1."""
    return max(1, _usual(table, OPTIMIZER))


def accumulated(table: StepTable) -> int:
    """Return the plan's `accumulate`."""
    value = table.records.plan.get("accumulate")
    return value if type(value) is int and value > 0 else 1


def bucket_bytes_of(setup: Mapping[str, Any], plan: Mapping[str, Any]) -> int | None:
    """Return the plan's `bucket_bytes`; what a training takes on its device where the plan leaves it open.

    None: no plan was recorded. `setup`: what the run noted of itself.
    """
    value = plan.get("bucket_bytes")
    on_device = setup.get(events.SETUP_DEVICE, "cpu") != "cpu"
    return Plan().with_bucket_bytes(on_device=on_device).bucket_bytes if value == 0 else value


def less_often(table: StepTable, seconds: float) -> Fix:
    """Return the fix by half as many exchanges for the same samples. `seconds`: exposed, of a step.

    See [Note: what accumulate changes].
    """
    gain = Gain(seconds / 2, "half as many exchanges for the same samples: half of the exposed time")
    sync = sync_of(table.records)
    if not sync.is_every_step:
        rarer = {"sync": replace(sync, steps=2 * sync.steps).to_text()}
        what = f"meet after {2 * sync.steps} steps of each rank, not {sync.steps} (ranks drift further apart)"
        return Fix(what, command_with(table.records, rarer), gain, rarer)
    now = accumulated(table)
    if table.front_end:  # whose optimizer counts passes itself
        passes = "two backward passes" if now == 1 else f"{2 * now} backward passes, not {now},"
        changes = {"accumulate": 2 * now}
        what = f"exchange gradients of {passes} at a time (doubles the global batch)"
        return Fix(what, command_with(table.records, changes), gain, changes)
    batch = table.records.timelines[0].setup.get(events.SETUP_BATCH)
    if type(batch) is int and batch > 0:
        return Fix(
            "batches twice as large (the learning rate may need a change)",
            f"batch_size={2 * batch}  # argument of the DataLoader", gain, {events.SETUP_BATCH: 2 * batch},
        )  # fmt: skip
    what = "batches twice as large; or step after every second one, without an exchange for the first"
    return Fix(what, held_passes(2, steps=True), gain)


def held_passes(count: int, *, steps: bool = False) -> str:
    """Return lines of a loop that exchange gradients after every `count`-th pass; with `steps`, and step there."""
    lines = f"with fd.accumulate((i + 1) % {count} > 0):\n    loss.backward()"
    return lines + (f"\nif (i + 1) % {count} == 0:\n    {_STEP}" if steps else "")


def _usual(table: StepTable, name: str) -> int:
    counts = [sum(phase.name == name for phase in row.phases) for own in table.rows for row in own]
    return statistics.mode(counts) if counts else 0
