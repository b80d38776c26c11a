"""Where the time of a pipeline goes: computing, the schedule's bubble, a slow stage, and transfers.

[Note: three reasons to wait] The time of a step is simulated twice: with all stages as slow as their mean, and
with those that were measured. Over the computing of a mean rank, the first is the bubble; the second over the
first is the slow stage; and what the ranks spend over the second is communication. Pipelines wait for each other
at the end of a step: of several, the slowest rank of each place counts for the slow stage, and the middle one for
the mean.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ...core.schedule.actions import Schedule
from ...core.schedule.build import build_schedule
from ...core.schedule.simulate import StageTimes, simulate
from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.events import (
    BACKWARD,
    FORWARD,
    PIPELINE_WAIT,
    SETUP_PIPELINE,
    SETUP_PIPELINE_CUTS,
    SETUP_PIPELINE_RANK,
)
from ..records.rows import StepRow, step_seconds
from ..records.timeline_reader import RankTimeline
from .figures import mean

_SLOWER = 1.1
"""Times as long as the fastest of its place from which a rank is a slow one."""


@dataclass(frozen=True)
class PipelineSeconds:
    """What was measured of a pipeline. See [Note: three reasons to wait]."""

    schedule: Schedule
    forward: list[float]
    """Seconds of a step by rank of the pipeline; of several pipelines, of the slowest."""
    backward: list[float]
    usual_forward: list[float]
    """The same of the middle one."""
    usual_backward: list[float]
    seconds: float
    """Seconds of the pipeline in a step: computing and waiting."""
    cuts: list[str]
    slow_ranks: list[tuple[int, ...]]
    """By rank of the pipeline: ranks that are slower than others of the same place; empty where none is."""

    @property
    def computing(self) -> list[float]:
        """Forward and backward."""
        return [f + b for f, b in zip(self.forward, self.backward, strict=True)]

    @property
    def usual_seconds(self) -> float:
        """Forward and backward of a mean rank."""
        return mean(self.usual_forward) + mean(self.usual_backward)

    @cached_property
    def _even(self) -> float:
        count = len(self.forward)
        return _simulated(self, [mean(self.usual_forward)] * count, [mean(self.usual_backward)] * count)

    @cached_property
    def simulated_seconds(self) -> float:
        """The schedule with the stages as they were measured, and no transfers."""
        return _simulated(self, self.forward, self.backward)

    @property
    def bubble(self) -> float:
        """What the schedule costs where all stages take as long."""
        return self._even - self.usual_seconds

    @property
    def slow_stage(self) -> float:
        """What unequal stages cost."""
        return max(0.0, self.simulated_seconds - self._even)

    @property
    def transfer(self) -> float:
        """What transfers between stages cost that nothing hides."""
        return max(0.0, self.seconds - max(self.simulated_seconds, self._even))


def measure_pipeline(
    timelines: Sequence[RankTimeline], rows: Sequence[Sequence[StepRow]]
) -> PipelineSeconds | None:
    """Return where the time of pipelines goes; None if the ranks form none, or `rows` (by rank) do not tell."""
    facts = [str(timeline.setup.get(SETUP_PIPELINE) or "") for timeline in timelines]
    if not facts or not facts[0] or len(set(facts)) > 1:
        return None
    try:
        name, *numbers = facts[0].split()
        ranks, micro_batches, chunks = map(int, numbers)
        schedule = build_schedule(name, ranks, micro_batches, chunks if name == "interleaved" else 0)
    except (ValueError, PlanError):
        return None  # of a newer version
    places: list[dict[int, dict[str, float]]] = [{} for _ in range(ranks)]
    """By place in the pipeline and rank: median seconds of each phase."""
    for timeline, own in zip(timelines, rows, strict=True):
        place = timeline.setup.get(SETUP_PIPELINE_RANK)
        if not isinstance(place, int) or not 0 <= place < ranks:
            return None
        if own:
            places[place][timeline.rank] = _medians([step_seconds(row) for row in own])
    if not all(places):
        return None
    slowest = [max(here.values(), key=_computing) for here in places]
    cuts = str(timelines[0].setup.get(SETUP_PIPELINE_CUTS) or "").split()
    return PipelineSeconds(
        schedule,
        [each[FORWARD] for each in slowest],
        [each[BACKWARD] for each in slowest],
        [statistics.median(each[FORWARD] for each in here.values()) for here in places],
        [statistics.median(each[BACKWARD] for each in here.values()) for here in places],
        mean([sum(each.values()) for here in places for each in here.values()]),
        cuts,
        [_slow_ranks(here) for here in places],
    )


def _medians(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = (FORWARD, BACKWARD, PIPELINE_WAIT)
    return {name: statistics.median(step.get(name, 0.0) for step in steps) for name in names}


def _computing(phases: Mapping[str, float]) -> float:
    return phases[FORWARD] + phases[BACKWARD]


def _slow_ranks(here: Mapping[int, Mapping[str, float]]) -> tuple[int, ...]:
    """Return the ranks of one place that are slower than the fastest of it by more than a tenth."""
    least = min(map(_computing, here.values()))
    slow = tuple(rank for rank, phases in here.items() if _computing(phases) > _SLOWER * least)
    return slow if len(slow) < len(here) else ()


def _simulated(measured: PipelineSeconds, forward: list[float], backward: list[float]) -> float:
    schedule = measured.schedule
    each = schedule.micro_batches * (schedule.stages // schedule.ranks)
    times = [
        StageTimes(forward[rank] / each, backward[rank] / 2 / each, backward[rank] / 2 / each)
        for rank in schedule.stage_ranks
    ]
    return simulate(schedule, times).total_seconds
