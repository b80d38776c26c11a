"""Schedules of a pipeline, which `core/schedule` builds, and of what trains: what a plan may say of them."""

from __future__ import annotations

from collections.abc import Mapping

from .errors import PlanError
from .suggestions import did_you_mean

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
DEFAULT_SCHEDULE = "1f1b"
SEVERAL_STAGES = ("interleaved", "zb-v")
"""Schedules with more than one stage a rank."""
DEFAULT_CHUNKS = 2
MOST_WEIGHT_VERSIONS = 2
"""PipeDream-2BW: Narayanan et al. 2006.09503, section 3.1."""


def require_schedule(name: str, chunks: int = 0) -> None:
    """Raise `PlanError` unless `name` is a schedule that can have `chunks` stages a rank; 0: its default."""
    if name not in SCHEDULES:
        raise PlanError(f"plan: schedule = {name!r} is none", remedy=did_you_mean(name, SCHEDULES))
    if chunks < 0:
        raise PlanError(f"plan: chunks = {chunks}, expected a number from 1, or 0 for the schedule's own")
    if name == "interleaved" and chunks == 1:
        raise PlanError(
            'plan: schedule = "interleaved" with chunks = 1 is 1f1b',
            remedy='set chunks = 2 or more, or schedule = "1f1b"',
        )
    if name != "interleaved" and chunks not in (0, chunks_of(name)):
        each = chunks_of(name)
        raise PlanError(
            f'plan: chunks = {chunks}, but schedule = "{name}" has {each} stage{"s" * (each > 1)} a rank',
            remedy='leave chunks out, or set schedule = "interleaved"',
        )


def chunks_of(name: str, chunks: int = 0) -> int:
    """Return how many stages a rank has in the schedule `name`; `chunks`: the plan's, 0 for the default."""
    return (chunks or DEFAULT_CHUNKS) if name in SEVERAL_STAGES else 1


def refuse_train_schedule(schedule: Mapping[str, str]) -> None:
    """Raise `PlanError` for a step that is none, one without patterns, and a schedule without a begin."""
    for step, patterns in schedule.items():
        if not (step.isascii() and step.isdigit() and str(int(step)) == step):
            raise PlanError(f"plan: train_schedule has the step {step!r}, expected a whole number from 0")
        if not patterns.split():
            raise PlanError(f"plan: train_schedule has no pattern for step {step}")
    if schedule and "0" not in schedule:
        raise PlanError(
            "plan: train_schedule does not say what trains from step 0 on",
            remedy='begin with an entry such as "0" = "head.*"',
        )
