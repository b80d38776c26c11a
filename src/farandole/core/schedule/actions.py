"""A pipeline schedule is a list of actions for each rank; it is data.

An action is written ``2F5``: stage 2, forward, micro-batch 5. The kinds are F (forward), B (backward), and for
schedules that divide the backward pass I (gradients of the stage's inputs) and W (gradients of its weights).

>>> str(Action(stage=2, kind="F", micro_batch=5))
'2F5'
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import NamedTuple

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "F", "B", "I", "W"
KINDS = {
    FORWARD: "forward", BACKWARD: "backward", BACKWARD_INPUT: "backward of inputs",
    BACKWARD_WEIGHT: "backward of weights",
}  # fmt: skip


class Action(NamedTuple):
    """What a rank does with one micro-batch on one of its stages."""

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of a training step on a pipeline, in order, for each rank of the pipeline."""

    name: str
    micro_batches: int
    stage_ranks: tuple[int, ...]
    """The rank of each stage."""
    actions: tuple[tuple[Action, ...], ...]
    """By rank."""

    @property
    def ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.actions)

    @property
    def stages(self) -> int:
        """Stages of the model; a rank may have several."""
        return len(self.stage_ranks)

    @property
    def divides_backward(self) -> bool:
        """Whether gradients of inputs and of weights are computed by separate actions."""
        return any(action.kind == BACKWARD_WEIGHT for actions in self.actions for action in actions)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of `rank`, in ascending order."""
        return tuple(stage for stage, owner in enumerate(self.stage_ranks) if owner == rank)

    def forward_of(self, micro_batches: int) -> Schedule:
        """Return the forward actions alone, of the first `micro_batches`: what an evaluation does."""
        actions = [
            tuple(each for each in row if each.kind == FORWARD and each.micro_batch < micro_batches)
            for row in self.actions
        ]
        return replace(self, micro_batches=micro_batches, actions=tuple(actions))


def is_ready(action: Action, done: Container[tuple[int, str, int]], stages: int, *, divided: bool) -> bool:
    """Return whether all that `action` `needs` is in `done`; of large schedules there are millions to ask."""
    stage, kind, micro_batch = action
    if kind == FORWARD:
        return not stage or (stage - 1, FORWARD, micro_batch) in done
    if kind == BACKWARD_WEIGHT:
        return (stage, BACKWARD_INPUT, micro_batch) in done
    after = BACKWARD_INPUT if divided else BACKWARD
    is_last = stage + 1 >= stages
    return (stage, FORWARD, micro_batch) in done and (is_last or (stage + 1, after, micro_batch) in done)


def needs(action: Action, stages: int, *, divided: bool) -> list[Action]:
    """Return the actions whose results `action` uses."""
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind == FORWARD:
        return [Action(stage - 1, FORWARD, micro_batch)] if stage else []
    if action.kind == BACKWARD_WEIGHT:
        return [Action(stage, BACKWARD_INPUT, micro_batch)]
    found = [Action(stage, FORWARD, micro_batch)]
    if stage + 1 < stages:
        found.append(Action(stage + 1, BACKWARD_INPUT if divided else BACKWARD, micro_batch))
    return found
