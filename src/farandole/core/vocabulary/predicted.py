"""What a plan says that a step will take: the names under its key `predicted`, and what values are possible.

The planner writes these figures into the plan, and a run that applied it is measured against them. They have no
effect on training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, get_args

from .errors import PlanError
from .suggestions import did_you_mean

Term = Literal[
    "compute", "recompute", "optimizer", "data", "shard", "tensor", "context", "expert", "transfer", "bubble",
    "codec", "loader", "straggler",
]  # fmt: skip
"""Parts of a step. They are disjoint, and their sum is the step: exchanges count as far as nothing hides them."""
TERMS: tuple[Term, ...] = get_args(Term)
STEP, LOW, HIGH = "step_seconds", "low_seconds", "high_seconds"
"""A step of the optimizer, and the interval that it is expected in."""
PEAK = "peak_bytes"
"""Memory of the rank that needs most, at most."""
RANKS, GLOBAL_BATCH = "ranks", "global_batch"
"""What it was predicted for: a step of other ranks or samples is no test of it."""
NAMES = (STEP, LOW, HIGH, PEAK, RANKS, GLOBAL_BATCH, *TERMS)
"""All names under `predicted`. A term is in seconds."""


def refuse_impossible(predicted: Mapping[str, float]) -> None:
    """Raise `PlanError` for names that are not of `NAMES`, and for values that nothing can take or hold."""
    for name, value in predicted.items():
        _refuse_value(name, value)
    if not predicted:
        return
    if STEP not in predicted:
        raise PlanError(
            f"plan: predicted has no {STEP}",
            remedy="write the predicted seconds of a step under this name, or leave predicted out",
        )
    step = predicted[STEP]
    for name, sign, than in ((LOW, -1, "most"), (HIGH, 1, "least")):
        if sign * (predicted.get(name, step) - step) < 0:
            raise PlanError(
                f"plan: predicted.{name} = {predicted[name]}, expected at {than} {STEP} = {step}",
                remedy="make the plan anew with farandole plan, or leave predicted out",
            )


def _refuse_value(name: str, value: float) -> None:
    where = f"plan: predicted.{name}"
    if name not in NAMES:
        expected = ", ".join(NAMES)
        raise PlanError(f"{where} is unknown, expected one of {expected}", remedy=did_you_mean(name, NAMES))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise PlanError(f"{where} = {value!r}, expected a number")
    if not 0 <= value < math.inf:
        raise PlanError(f"{where} = {value}, expected a finite number from 0")
    if name in (STEP, RANKS, GLOBAL_BATCH) and not value:
        raise PlanError(f"{where} = {value}, expected more than 0")
    if name in (RANKS, GLOBAL_BATCH) and value != round(value):
        raise PlanError(f"{where} = {value}, expected a whole number")
