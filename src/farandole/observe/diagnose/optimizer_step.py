"""An optimizer that computes slowly, and batches so small that its step, or the exchange, is much of their time.

[Note: fused optimizers] On the CPU torch's optimizers go through the parameters one by one, a dozen operations
each, unless ``fused=True``: then one operation does it all. What of their time remains was measured
(docs/check/slow.md); the least favourable measurement is used. Nothing was saved for SGD without momentum, which
is one operation a parameter anyway. ``foreach=True`` helps those without a fused form only where tensors are
small.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from ...core.vocabulary import events
from ...core.vocabulary.events import OPTIMIZER
from ...core.vocabulary.units import format_seconds, format_share
from ..figures.figures import low_median, mean
from .finding import LEAST_SHARE, Finding, Fix, Gain, confidence, format_cost
from .step_table import StepTable, held_passes, passes_of

_LEAST_SHARE = 0.1
"""Fraction of a step: a smaller optimizer step is as it should be."""
_SMALL_TENSOR = 4096
_SMALL_BATCH = 4
_FIXED_SHARE = 0.2
_LARGER = 4


@dataclass(frozen=True)
class _Faster:
    option: str
    saves: float
    """Fraction of the optimizer's time."""
    saves_alone: float
    """The same of a rank with one thread."""
    only_small: bool = False
    only_with_momentum: bool = False


_FASTER: Mapping[str, _Faster] = {
    "Adam": _Faster("fused", 0.59, 0.71), "AdamW": _Faster("fused", 0.61, 0.71),
    "Adagrad": _Faster("fused", 0.48, 0.62),
    "SGD": _Faster("fused", 0.46, 0.56, only_small=True, only_with_momentum=True),
    "RMSprop": _Faster("foreach", 0.25, 0.27, only_small=True),
}  # fmt: skip
"""By class. See [Note: fused optimizers]."""


def find_optimizer(table: StepTable) -> list[Finding]:
    """Find an optimizer on the CPU that goes through its parameters one by one."""
    setup = table.records.timelines[0].setup
    name, tensors = str(setup.get(events.SETUP_OPTIMIZER)), setup.get(events.SETUP_TENSORS)
    elements = setup.get(events.SETUP_ELEMENTS)
    faster = _FASTER.get(name)
    whole = _usual(table, OPTIMIZER)
    if (
        faster is None
        or setup.get(events.SETUP_DEVICE) != "cpu"
        or type(tensors) is not int
        or type(elements) is not int
        or tensors < 1
        or whole < _LEAST_SHARE * table.step_seconds
        or setup.get(events.SETUP_FUSED)
        or (faster.option == "foreach" and setup.get(events.SETUP_FOREACH))
        or (faster.only_with_momentum and not setup.get(events.SETUP_MOMENTUM))
        or (faster.only_small and elements / tensors > _SMALL_TENSOR)
    ):
        return []
    saves = faster.saves_alone if setup.get(events.SETUP_THREADS) == 1 else faster.saves
    seconds = saves * whole
    share = seconds / table.step_seconds
    evidence = (
        f"optimizer.step() takes {format_seconds(whole)} a step, {format_share(whole / table.step_seconds)} of it",
        f"{tensors} parameter tensors of {elements / tensors:.3g} elements on average, "
        f"{format_seconds(whole / tensors)} each",
    )
    gain = Gain(seconds, f"{format_share(saves)} of the optimizer's time, the least that was measured")
    fix = Fix(
        f"compute all parameters in {'one operation' if faster.option == 'fused' else 'few operations'}",
        f"{faster.option}=True  # argument of torch.optim.{name}", gain, {f"optimizer_{faster.option}": True},
    )  # fmt: skip
    title = f"{name} goes through {tensors} parameters one by one: {format_cost(seconds, share)}"
    sure = confidence(len(table.steps))
    return [Finding("optimizer", title, seconds, share, (), (), OPTIMIZER, evidence, (fix,), sure)]


def find_small_batch(table: StepTable) -> list[Finding]:
    """Find batches so small that optimizer and exchange, which are the same for any, are much of a step."""
    samples = [cell.samples for own in table.cells for cell in own if cell.samples]
    if not samples:
        return []
    known = table.records.timelines[0].setup.get(events.SETUP_BATCH)
    # Several models of one loop each have passes: a loader says what a batch is.
    batch = known if type(known) is int and known > 0 else statistics.median(samples) / max(1, passes_of(table))
    fixed = _usual(table, OPTIMIZER)
    if len(table.cells) > 1:
        fixed += mean([cell.communication for own in table.cells for cell in own])
    seconds = fixed * (1 - 1 / _LARGER)
    share = seconds / table.step_seconds
    if batch > _SMALL_BATCH or fixed < _FIXED_SHARE * table.step_seconds or share < LEAST_SHARE:
        return []
    larger = max(1, round(batch)) * _LARGER
    gain = Gain(seconds, f"{_LARGER - 1}/{_LARGER} of optimizer and exchange, for the same samples")
    evidence = (
        f"a batch of a rank has {batch:.3g} sample{'s' * (batch != 1)}; optimizer and exchange take "
        f"{format_seconds(fixed)} of a step of {format_seconds(table.step_seconds)}, however large it is",
    )
    fixes = (
        Fix(
            "a larger batch (computing is faster with it too; the learning rate may need a change)",
            f"batch_size={larger}  # argument of the DataLoader", gain, {events.SETUP_BATCH: larger},
        ),
        Fix(
            f"or step once every {_LARGER} batches, without an exchange for the others",
            held_passes(_LARGER, steps=True),
        ),
    )  # fmt: skip
    size = f"a batch of {batch:.3g} sample{'s' * (batch != 1)}"
    title = f"{size} is too small for its optimizer step and exchange: {format_cost(seconds, share)}"
    return [Finding("small-batch", title, seconds, share, evidence=evidence, fixes=fixes, confidence="medium")]


def _usual(table: StepTable, phase: str) -> float:
    return mean([low_median([cell.phases.get(phase, 0.0) for cell in cells]) for cells in table.by_step()])
