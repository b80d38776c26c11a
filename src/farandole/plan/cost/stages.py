"""The stages of a pipeline: which units each has, what a pass takes on it, and the step that a schedule makes.

[Note: a long schedule] In the middle of a schedule each round of p micro-batches takes as long as the one before.
So a long one is simulated twice, with few rounds and with one more, and continued by their difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from ...core.schedule import LayerCost, build_schedule, partition
from ...core.schedule_simulation import Schedule, Simulator, StageTimes, in_flight
from ...core.vocabulary.errors import PlanError
from ..profile import ModelProfile, ModelUnit
from .layout import RunLayout
from .rates import Rates, Spent
from .units import UnitPass, is_block

_STATES = 4
"""Parameters, gradients, and two states of the optimizer: as the product weighs layers."""
_IN_A_ROW = 2
"""Batches after which a pipeline without a flush is full."""
_MOST_ACTIONS = 6000
"""A schedule with more is simulated with fewer micro-batches, and continued. See [Note: a long schedule]."""
_MOST_ROUNDS = 12
"""Rounds that are simulated at most: of 1,137 schedules with stages of random times 126 were off then, by 1 %."""


@dataclass
class StageUnits:
    """Units that follow each other on one rank."""

    units: list[tuple[int, int]] = field(default_factory=list)
    """(index of the unit in the profile, how many of them), in the order of forward."""

    def add(self, unit: int) -> None:
        """Add one unit."""
        if self.units and self.units[-1][0] == unit:
            self.units[-1] = unit, self.units[-1][1] + 1
        else:
            self.units.append((unit, 1))


@dataclass(frozen=True)
class PipelineStep:
    """A step of a pipeline in time."""

    seconds: float
    """From the first forward pass to the end of the last backward pass."""
    without_transfers: float
    """The same if nothing had to travel."""
    busiest: int
    """The rank that works longest."""


def whole_model(profile: ModelProfile) -> list[StageUnits]:
    """Return one stage with all units."""
    return [StageUnits([(i, unit.count) for i, unit in enumerate(profile.units)])]


def cut(profile: ModelProfile, passes: Sequence[UnitPass], layout: RunLayout) -> list[StageUnits]:
    """Return the stages: by the plan's cuts, else so that the slowest is fastest, as the product cuts.

    Raises:
        PlanError: the model cannot be cut, or not so often, or a cut names no unit.
    """
    pipeline = layout.degrees.pipeline
    if pipeline == 1:
        return whole_model(profile)
    if profile.can_be_cut:
        raise PlanError(f"plan: pipeline = {pipeline}: {profile.can_be_cut}", remedy="use pipeline = 1")
    stages = pipeline * layout.chunks
    layers = [i for i, unit in enumerate(profile.units) for _ in range(unit.count)]
    starts = _named_cuts(profile, layers, layout) if layout.plan.pipeline_cuts else _balanced(
        profile, passes, layers, layout
    )  # fmt: skip
    if len(starts) != stages - 1:
        raise PlanError(
            f"plan: pipeline_cuts has {len(starts)} names, and {stages} stages have {stages - 1} cuts",
            remedy="name the first module of each stage but the first",
        )
    found = []
    for begin, end in zip([0, *starts], [*starts, len(layers)], strict=True):
        stage = StageUnits()
        for unit in layers[begin:end]:
            stage.add(unit)
        found.append(stage)
    return found


def _balanced(
    profile: ModelProfile, passes: Sequence[UnitPass], layers: Sequence[int], layout: RunLayout
) -> list[int]:
    costs = []
    for unit in layers:
        facts, made = profile.units[unit], passes[unit]
        costs.append((
            facts.name, made.forward_seconds + made.backward_seconds,
            round(_STATES * sum(each.nbytes for each in facts.gradients) / layout.degrees.tensor),
            round(facts.saved_bytes * layout.samples * layout.width / layout.degrees.tensor),
            round(profile.units[max(0, unit - 1)].output_bytes * layout.samples),
        ))  # fmt: skip
    kept = kept_micro_batches(layout)
    return list(_partition(tuple(costs), tuple(kept[rank] for rank in stage_owners(layout))))


@lru_cache(maxsize=256)
def _partition(costs: tuple[tuple[str, float, int, int, int], ...], kept: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(partition([LayerCost(*each) for each in costs], len(kept), in_flight=kept))


def _named_cuts(profile: ModelProfile, layers: Sequence[int], layout: RunLayout) -> list[int]:
    """Return the layers at which stages begin: by the name of a unit, or by the number of a repeated block."""
    names: dict[str, int] = {}
    numbers, position = [], 0
    for unit in profile.units:
        stem, _, number = unit.name.rpartition(".")
        for each in range(unit.count):
            name = f"{stem}.{int(number) + each}" if number.isdigit() else unit.name
            names.setdefault(name.lstrip("."), position)
            if is_block(unit, profile):
                numbers.append(position)
            position += 1
    found = []
    for text in layout.plan.pipeline_cuts:
        if text in names:
            found.append(names[text])
        elif text.isascii() and text.isdigit() and int(text) < len(numbers):
            found.append(numbers[int(text)])
        else:
            inside = next((name for name in names if text.startswith(f"{name}.")), None)
            if inside is None:
                raise PlanError(
                    f"plan: pipeline_cuts has {text!r}, which is no unit of {profile.name}",
                    remedy=f"units: {', '.join(list(names)[:8])}{', ...' if len(names) > 8 else ''}",
                )
            found.append(names[inside])
    if found != sorted(set(found)) or (found and not 0 < found[0] < len(layers)):
        raise PlanError(
            f"plan: pipeline_cuts = {list(layout.plan.pipeline_cuts)} are not in the order of the model, "
            "after its first unit",
            remedy="sort them, and name no unit twice or the first one",
        )
    return found


def stage_owners(layout: RunLayout) -> tuple[int, ...]:
    """Return the place in the pipeline of each stage."""
    if layout.degrees.pipeline == 1:
        return (0,)
    return short_schedule(*_shape(layout)).schedule.stage_ranks


def kept_micro_batches(layout: RunLayout) -> tuple[int, ...]:
    """Return, of each rank of the pipeline, how many activations of a stage it keeps at most at once."""
    if layout.degrees.pipeline == 1:
        return (1,)
    return short_schedule(*_shape(layout)).kept


def _shape(layout: RunLayout) -> tuple[str, int, int, int]:
    return layout.plan.schedule, layout.degrees.pipeline, layout.micro_batches, layout.plan.chunks


class ShortSchedule(NamedTuple):
    """A schedule with just so many micro-batches that it keeps as many at once as a longer one."""

    schedule: Schedule
    kept: tuple[int, ...]
    """By rank, as `in_flight` says."""


def short_schedule(name: str, ranks: int, micro_batches: int, chunks: int) -> ShortSchedule:
    """Return where stages are in a schedule, and what is kept. Raises `PlanError` where there is none."""
    enough = min(micro_batches, 2 * ranks + micro_batches % ranks)
    if name == "gpipe" or (name == "interleaved" and micro_batches % ranks):  # which is refused by its number
        enough = micro_batches
    return _short(name, ranks, enough, chunks)


@lru_cache(maxsize=256)
def _short(name: str, ranks: int, micro_batches: int, chunks: int) -> ShortSchedule:
    schedule = _schedule(name, ranks, micro_batches, chunks)
    return ShortSchedule(schedule, in_flight(schedule))


@lru_cache(maxsize=64)
def _schedule(name: str, ranks: int, micro_batches: int, chunks: int) -> Schedule:
    return build_schedule(name, ranks, micro_batches, chunks)


@lru_cache(maxsize=64)
def _simulator(name: str, ranks: int, micro_batches: int, chunks: int) -> Simulator:
    return Simulator(_schedule(name, ranks, micro_batches, chunks))


def transfer(unit: ModelUnit, layout: RunLayout, rates: Rates) -> tuple[Spent, int]:
    """Return what brings a micro-batch from one stage to the next, and its bytes."""
    nbytes = unit.output_bytes * layout.samples * layout.residual_width / layout.degrees.context
    spent = rates.exchange("send", layout.degrees.pipeline, layout.stride("pipeline"), nbytes)
    return spent, round(nbytes)


def pipeline_step(times: Sequence[StageTimes], layout: RunLayout) -> PipelineStep:
    """Return the step that the plan's schedule makes of the stages' times."""
    plan, ranks, most = layout.plan, layout.degrees.pipeline, layout.micro_batches
    key = tuple(times)
    alone = tuple(StageTimes(t.forward_seconds, t.backward_input_seconds, t.backward_weight_seconds) for t in key)
    batches = (_IN_A_ROW + 1, _IN_A_ROW) if plan.weight_versions > 1 else (1,)

    def step(of_stages: tuple[StageTimes, ...]) -> float:
        """Without a flush a step is what one more batch adds."""
        ends = [_long(plan.schedule, ranks, each * most, plan.chunks, of_stages) for each in batches]
        return ends[0] - sum(ends[1:])

    seconds = step(key)
    free = seconds if alone == key else step(alone)
    owners = stage_owners(layout)
    busy = [0.0] * ranks
    for stage, each in enumerate(key):
        busy[owners[stage]] += each.compute_seconds
    return PipelineStep(seconds, free, max(range(ranks), key=busy.__getitem__))


def simulated_micro_batches(ranks: int, stages: int, micro_batches: int) -> int:
    """Return with how many micro-batches a schedule is simulated; see [Note: a long schedule]."""
    rounds = max(3, min(_MOST_ROUNDS, _MOST_ACTIONS // (3 * stages * ranks)))
    return min(micro_batches, (rounds + 1) * ranks + micro_batches % ranks)


@lru_cache(maxsize=4096)
def _long(name: str, ranks: int, micro_batches: int, chunks: int, times: tuple[StageTimes, ...]) -> float:
    fewer = simulated_micro_batches(ranks, len(times), micro_batches)
    if micro_batches == fewer:
        return _simulator(name, ranks, micro_batches, chunks).total_seconds(times)
    first = _simulator(name, ranks, fewer - ranks, chunks).total_seconds(times)
    second = _simulator(name, ranks, fewer, chunks).total_seconds(times)
    return second + (micro_batches - fewer) // ranks * (second - first)
