"""Schedules of a pipeline, which `core/schedule` builds, and of what trains: what a plan may say of them."""

from __future__ import annotations

from collections.abc import Mapping

from .degrees import Degree
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


def refuse_pipeline_keys(
    *,
    pipeline: Degree,
    schedule: str,
    chunks: int,
    micro_batches: int,
    cuts: tuple[str, ...],
    accumulate: int,
    weight_versions: int = 1,
) -> None:
    """Raise `PlanError` where the keys of a pipeline contradict each other, or there is none."""
    require_schedule(schedule, chunks)
    if micro_batches < 0:
        raise PlanError(f"plan: micro_batches = {micro_batches}, expected a number from 1, or 0 for the default")
    if accumulate > 1 and (micro_batches > 1 or pipeline != 1):
        raise PlanError(
            f"plan: accumulate = {accumulate}, and fd.step accumulates micro-batches",
            remedy="set micro_batches instead of accumulate",
        )
    if weight_versions not in (1, MOST_WEIGHT_VERSIONS):
        raise PlanError(
            f"plan: weight_versions = {weight_versions}, expected 1, or 2 for batches without a flush between them"
        )
    if pipeline != 1:
        _refuse_versions(pipeline, schedule, micro_batches, weight_versions)
        return
    for name, value, default in (
        ("schedule", schedule, DEFAULT_SCHEDULE),
        ("chunks", chunks, 0),
        ("weight_versions", weight_versions, 1),
        ("pipeline_cuts", cuts, ()),
    ):
        if value != default:
            raise PlanError(
                f"plan: {name} = {list(value) if isinstance(value, tuple) else value!r} is for a pipeline, and "
                "pipeline = 1",
                remedy=f"set pipeline to the number of its ranks, or leave {name} out",
            )


def _refuse_versions(pipeline: Degree, schedule: str, micro_batches: int, weight_versions: int) -> None:
    if weight_versions == 1:
        return
    if schedule != DEFAULT_SCHEDULE:
        raise PlanError(
            f'plan: weight_versions = {weight_versions} with schedule = "{schedule}": batches follow each other '
            "without a flush by 1f1b alone",
            remedy='set schedule = "1f1b", or leave weight_versions out',
        )
    if isinstance(pipeline, int) and 0 < micro_batches < pipeline:
        raise PlanError(
            f"plan: weight_versions = {weight_versions} with micro_batches = {micro_batches} and pipeline = "
            f"{pipeline}: with fewer micro-batches than ranks two versions of the weights are not enough",
            remedy=f"set micro_batches = {pipeline} or more",
        )


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
