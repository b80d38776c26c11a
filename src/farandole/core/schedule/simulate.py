"""When each action of a schedule runs, given how long actions and transfers take: an event simulation.

[Note: the model of a transfer] The result of an action leaves for the rank that needs it when the action ends, and
the rank computes on meanwhile. Messages from one rank to another travel one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .actions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, KINDS, Action, Schedule, crosses
from .validate import validate


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one stage with one micro-batch."""

    forward_seconds: float
    backward_input_seconds: float
    backward_weight_seconds: float
    send_seconds: float = 0.0
    """To bring its output to the next stage, or the gradient back; 0 between stages of one rank."""

    def seconds_of(self, kind: str) -> float:
        """Return the seconds of an action of `kind`."""
        return {
            FORWARD: self.forward_seconds,
            BACKWARD: self.backward_input_seconds + self.backward_weight_seconds,
            BACKWARD_INPUT: self.backward_input_seconds,
            BACKWARD_WEIGHT: self.backward_weight_seconds,
        }[kind]

    @property
    def compute_seconds(self) -> float:
        """Forward and backward."""
        return self.forward_seconds + self.backward_input_seconds + self.backward_weight_seconds


@dataclass(frozen=True, slots=True)
class ActionSpan:
    """One action in time. Seconds from the begin of the step."""

    rank: int
    action: Action
    begin_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """A step on the pipeline."""

    spans: tuple[ActionSpan, ...]
    """In the order in which they begin."""
    total_seconds: float
    busy_seconds: tuple[float, ...]
    """By rank."""

    @property
    def bubble_seconds(self) -> float:
        """Time in which the busiest rank waits."""
        return self.total_seconds - max(self.busy_seconds)

    @property
    def bubble_share(self) -> float:
        """`bubble_seconds` as a share of the step."""
        return self.bubble_seconds / self.total_seconds if self.total_seconds else 0.0


class Simulator:
    """A schedule that is simulated with several times: what does not depend on times is found out once.

    A rank's messages to another rank leave in the order of its actions, so one order of actions serves all times.
    """

    def __init__(self, schedule: Schedule) -> None:
        """Raises `PlanError` if the schedule is not valid."""
        self._ranks = schedule.ranks
        self._steps: list[_ActionStep] = []
        divided, known = schedule.divides_backward, dict[tuple[int, str, int], int]()
        for rank, action in validate(schedule):
            known[action] = len(self._steps)
            # What an action uses of its own rank has ended when the rank is free.
            after = crosses(action, schedule.stages, divided=divided)
            is_sent = after is not None and schedule.stage_ranks[after[0]] != rank
            receiver = _receiver(schedule, action)
            self._steps.append(
                _ActionStep(
                    rank, action, known[after] if after is not None and is_sent else None,
                    receiver if receiver != rank else None,
                    action.stage if action.kind == FORWARD else action.stage - 1,
                )
            )  # fmt: skip

    def run(self, times: Sequence[StageTimes]) -> Simulation:
        """Return when each action runs; arguments as those of `simulate`."""
        ended = self._run(times)
        spans = [
            ActionSpan(step.rank, step.action, begin, end)
            for step, begin, end in zip(self._steps, ended.begins, ended.ends, strict=True)
        ]
        spans.sort(key=lambda span: (span.begin_seconds, span.rank))
        return Simulation(tuple(spans), max(ended.free), tuple(ended.busy))

    def total_seconds(self, times: Sequence[StageTimes]) -> float:
        """Return how long a step takes, and nothing else."""
        return max(self._run(times).free)

    def _run(self, times: Sequence[StageTimes]) -> _Ended:
        free, busy = [0.0] * self._ranks, [0.0] * self._ranks
        seconds = [{kind: stage.seconds_of(kind) for kind in KINDS} for stage in times]
        begins: list[float] = []
        ends: list[float] = []
        arrivals: list[float] = []
        """When the result of an action is on the rank that needs it; on its own rank: when it ends."""
        link_free: dict[tuple[int, int], float] = {}
        for rank, (stage, kind, _), after, receiver, before in self._steps:
            begin = free[rank]
            if after is not None and arrivals[after] > begin:
                begin = arrivals[after]
            lasts = seconds[stage][kind]
            arrival = end = free[rank] = begin + lasts
            busy[rank] += lasts
            if receiver is not None:
                arrival = max(end, link_free.get((rank, receiver), 0.0)) + times[before].send_seconds
                link_free[rank, receiver] = arrival
            begins.append(begin)
            ends.append(end)
            arrivals.append(arrival)
        return _Ended(begins, ends, free, busy)


class _Ended(NamedTuple):
    begins: list[float]
    ends: list[float]
    free: list[float]
    """By rank, when its last action ends."""
    busy: list[float]


class _ActionStep(NamedTuple):
    rank: int
    action: Action
    after: int | None
    """Position of the action on another rank whose result it uses."""
    receiver: int | None
    """The other rank that its result is sent to."""
    before: int
    """The stage before the border that its result crosses."""


def simulate(schedule: Schedule, times: Sequence[StageTimes]) -> Simulation:
    """Run `schedule` in simulated time; `times` are those of each stage. Raises `PlanError` if it is not valid."""
    return Simulator(schedule).run(times)


def _receiver(schedule: Schedule, action: Action) -> int | None:
    """Return the rank that the result of `action` is sent to."""
    if action.kind == FORWARD:
        return schedule.stage_ranks[action.stage + 1] if action.stage + 1 < schedule.stages else None
    if action.kind == BACKWARD_WEIGHT or not action.stage:
        return None
    return schedule.stage_ranks[action.stage - 1]
