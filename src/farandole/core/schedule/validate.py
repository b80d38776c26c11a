"""What is wrong with a schedule: checked before anything runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import NoReturn

from ..vocabulary.errors import PlanError
from .actions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, Schedule, is_ready


def validate(schedule: Schedule) -> tuple[tuple[int, Action], ...]:
    """Return all actions with their ranks, in an order in which they can run.

    Raises `PlanError` unless every micro-batch passes every stage once, on its rank, without a deadlock.
    """
    if not schedule.actions or not schedule.stage_ranks or schedule.micro_batches < 1:
        _refuse(schedule, "it has no ranks, no stages or no micro-batches")
    unknown = [rank for rank in schedule.stage_ranks if not 0 <= rank < schedule.ranks]
    if unknown:
        _refuse(schedule, f"a stage is on rank {unknown[0]}, and there are {schedule.ranks} ranks")
    kinds = (FORWARD, *((BACKWARD_INPUT, BACKWARD_WEIGHT) if schedule.divides_backward else (BACKWARD,)))
    for rank, actions in enumerate(schedule.actions):
        expected = set(product(schedule.stages_of(rank), kinds, range(schedule.micro_batches)))
        if len(actions) != len(expected) or set[tuple[int, str, int]](actions) != expected:
            _refuse_actions(schedule, kinds)
    return _in_order(schedule)


def _refuse_actions(schedule: Schedule, kinds: Sequence[str]) -> NoReturn:
    """Say what is wrong with the actions of a schedule, of which some rank has others than it should."""
    expected = {
        Action(stage, kind, micro_batch)
        for stage in range(schedule.stages)
        for kind in kinds
        for micro_batch in range(schedule.micro_batches)
    }
    known = frozenset(expected)
    for rank, actions in enumerate(schedule.actions):
        for action, count in Counter(actions).items():
            if action not in known:
                _refuse(schedule, f"rank {rank} has {action}, which is no action of it")
            if schedule.stage_ranks[action.stage] != rank:
                _refuse(
                    schedule,
                    f"rank {rank} has {action}, but stage {action.stage} is on rank "
                    f"{schedule.stage_ranks[action.stage]}",
                )
            if count > 1:
                _refuse(schedule, f"rank {rank} has {action} {count} times")
            expected.discard(action)
    _refuse(schedule, f"{min(expected)} is missing")


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return the most micro-batches whose activations each rank keeps at once, all of its stages together.

    Activations are kept from the forward pass to the backward pass, to that of the weights if it is divided.
    """
    most = []
    for actions in schedule.actions:
        kept = peak = 0
        for action in actions:
            kept += (action.kind == FORWARD) - (action.kind in (BACKWARD, BACKWARD_WEIGHT))
            peak = max(peak, kept)
        most.append(peak)
    return tuple(most)


@lru_cache(maxsize=2)
def _in_order(schedule: Schedule) -> tuple[tuple[int, Action], ...]:
    """Return the order; it is kept for the simulation that often follows where a schedule was built."""
    order: list[tuple[int, Action]] = []
    divided, stages, done = schedule.divides_backward, schedule.stages, set[tuple[int, str, int]]()
    position = [0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                if not is_ready(action, done, stages, divided=divided):
                    break
                done.add(action)
                order.append((rank, action))
                position[rank] += 1
                moved = True
    stuck = [
        f"rank {rank} at {actions[position[rank]]}"
        for rank, actions in enumerate(schedule.actions)
        if position[rank] < len(actions)
    ]
    if stuck:
        _refuse(schedule, f"it deadlocks: each waits for another, {', '.join(stuck)}")
    return tuple(order)


def _refuse(schedule: Schedule, why: str) -> NoReturn:
    raise PlanError(f"schedule {schedule.name!r}: {why}", remedy="take one of the named schedules")
