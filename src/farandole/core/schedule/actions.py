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

from ..vocabulary.errors import PlanError
from ..vocabulary.rules import chunks_of, require_schedule

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
    """Return whether all whose results `action` uses are in `done`; large schedules ask a million times."""
    stage, kind, micro_batch = action
    own = BACKWARD_INPUT if kind == BACKWARD_WEIGHT else FORWARD
    if kind != FORWARD and (stage, own, micro_batch) not in done:
        return False
    after = crosses(action, stages, divided=divided)
    return after is None or after in done


def crosses(action: Action, stages: int, *, divided: bool) -> tuple[int, str, int] | None:
    """Return the action of another stage whose result `action` uses."""
    stage, kind, micro_batch = action
    if kind == FORWARD:
        return (stage - 1, FORWARD, micro_batch) if stage else None
    if kind == BACKWARD_WEIGHT or stage + 1 >= stages:
        return None
    return stage + 1, BACKWARD_INPUT if divided else BACKWARD, micro_batch


# The bubble of the named schedules in closed form: stages take equally long, and transfers take no time.
#
# p ranks, v stages a rank. F, I and W: seconds of forward, backward of inputs and backward of weights of one
# micro-batch on all stages of a rank together.


def bubble_seconds(
    name: str, ranks: int, forward: float, backward_input: float, backward_weight: float, *, chunks: int = 0
) -> float:
    """Return the seconds that each rank waits in a step; the times are seconds.

    Valid from as many micro-batches as ranks on, ``zb-v`` from 2 p - 1 on.

    - gpipe, 1f1b: (p - 1) (F + I + W)
    - interleaved: that over v (Narayanan et al. 2104.04473, section 2.2)
    - zb-h1: (p - 1) (F + max(I - W, 0)); the paper has I >= W (Qi et al. 2401.10241, table 1)
    - zb-v: (p - 1) (F + I - W) / 2 with equal times; with others `PlanError`: to be simulated
    """
    require_schedule(name, chunks)
    if name in ("gpipe", "1f1b", "interleaved"):
        return (ranks - 1) * (forward + backward_input + backward_weight) / chunks_of(name, chunks)
    if name == "zb-h1":
        return (ranks - 1) * (forward + max(backward_input - backward_weight, 0.0))
    if not forward == backward_input == backward_weight:
        raise PlanError("schedule 'zb-v' has no closed form unless all times are equal", remedy="simulate it")
    return (ranks - 1) * (forward + backward_input - backward_weight) / 2
