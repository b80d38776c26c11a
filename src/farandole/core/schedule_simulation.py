"""Schedules validated, simulated and drawn, and batches that go through them one behind the other.

[Note: the model of a transfer] The result of an action leaves for the rank that needs it when the action ends, and
the rank computes on meanwhile. Messages from one rank to another travel one after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from html import escape
from itertools import product
from typing import NamedTuple, NoReturn

from .vocabulary.errors import PlanError
from .vocabulary.rules import chunks_of, require_schedule

# A pipeline schedule is a list of actions for each rank; it is data.
#
# An action is written ``2F5``: stage 2, forward, micro-batch 5. The kinds are F (forward), B (backward), and for
# schedules that divide the backward pass I (gradients of the stage's inputs) and W (gradients of its weights).
#
# >>> str(Action(stage=2, kind="F", micro_batch=5))
# '2F5'


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


# What is wrong with a schedule: checked before anything runs.


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


# A simulated schedule as a grid of characters and as an SVG: one row a rank, time from left to right.

_COLORS = {FORWARD: "#4c78a8", BACKWARD: "#f58518", BACKWARD_INPUT: "#e8a33d", "W": "#72b7b2"}
_WIDTH, _ROW, _LEFT, _HEAD = 960.0, 26, 64, 34
_MOST_COLUMNS = 400
_LETTERS = 6.5
"""Pixels of a letter of the labels."""


def draw_grid(simulation: Simulation, *, unit_seconds: float) -> str:
    """Return one line a rank: a cell of four characters for `unit_seconds`, dots for the bubble.

    ``F3`` is the forward pass of micro-batch 3, ``B3`` its backward pass, ``I3`` and ``W3`` the parts of a divided
    one; a prime marks further stages of the rank. A step of more than 400 cells is cut, and the line says so.
    """
    columns = round(simulation.total_seconds / unit_seconds)
    lines = []
    for rank in range(len(simulation.busy_seconds)):
        cells = ["."] * columns
        mine = [span for span in simulation.spans if span.rank == rank]
        first = min((span.action.stage for span in mine), default=0)
        for span in mine:
            begin, end = (round(at / unit_seconds) for at in (span.begin_seconds, span.end_seconds))
            prime = "'" if span.action.stage != first else ""
            cells[begin:end] = [f"{span.action.kind}{span.action.micro_batch}{prime}", *["-"] * (end - begin - 1)]
        row = "".join(f"{cell:<4}" for cell in cells[:_MOST_COLUMNS]).rstrip()
        lines.append(f"rank {rank:<3} {row}{' ...' if columns > _MOST_COLUMNS else ''}")
    return "\n".join(lines) + "\n"


def draw_svg(simulation: Simulation, *, title: str) -> str:
    """Return the schedule as an SVG document, with a tooltip for each action."""
    ranks = len(simulation.busy_seconds)
    scale = (_WIDTH - _LEFT - 8) / (simulation.total_seconds or 1.0)
    height = _HEAD + ranks * _ROW + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {height}" font-family="sans-serif" '
        f'font-size="11"><title>{escape(title)}</title>',
        f'<rect width="{_WIDTH:g}" height="{height}" fill="white"/>',
        f'<text x="8" y="20" font-size="13">{escape(title)}</text>',
    ]
    for rank in range(ranks):
        top = _HEAD + rank * _ROW
        parts.append(f'<text x="8" y="{top + 16}">rank {rank}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{top}" width="{simulation.total_seconds * scale:.2f}" height="{_ROW - 4}" '
            'fill="#eeeeee"/>'
        )
    first = {rank: min(s.action.stage for s in simulation.spans if s.rank == rank) for rank in range(ranks)}
    parts += [_box(span, scale, is_first=span.action.stage == first[span.rank]) for span in simulation.spans]
    at = float(_LEFT)
    for kind, name in KINDS.items():
        if any(span.action.kind == kind for span in simulation.spans):
            parts.append(f'<rect x="{at}" y="{height - 20}" width="12" height="12" fill="{_COLORS[kind]}"/>')
            parts.append(f'<text x="{at + 16}" y="{height - 10}">{name}</text>')
            at += 36 + _LETTERS * len(name)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _box(span: ActionSpan, scale: float, *, is_first: bool) -> str:
    action = span.action
    left, width = _LEFT + span.begin_seconds * scale, (span.end_seconds - span.begin_seconds) * scale
    top = _HEAD + span.rank * _ROW
    label = str(action.micro_batch)
    text = (
        f'<text x="{left + width / 2:.2f}" y="{top + 15}" text-anchor="middle" fill="white">{label}</text>'
        if width > _LETTERS * len(label)
        else ""
    )
    what = f"{KINDS[action.kind]} of micro-batch {action.micro_batch}, stage {action.stage}"
    return (
        f'<g><title>{what}</title><rect x="{left:.2f}" y="{top}" width="{max(width - 0.5, 0.1):.2f}" '
        f'height="{_ROW - 4}" fill="{_COLORS[action.kind]}" opacity="{1 if is_first else 0.7}"/>'
        f"{text}</g>"
    )


# 1F1B without a flush: batches follow each other in the pipeline (PipeDream-2BW).
#
# Narayanan et al. 2006.09503, section 3.1. The warm-up of a batch is filled with the backward passes that the
# batch before left open, so no rank waits between two batches. With batches of m micro-batches the actions of k
# batches are those of 1F1B with k m micro-batches: micro-batch n is of batch n // m. What a rank does in one
# call of `fd.step` begins with its first forward pass of the batch and ends before that of the next one;
# backward passes of the last p - 1 - r micro-batches on rank r are then still to come. They end within the next
# call if m >= p - 1; the paper has m >= p, so that two versions of the weights are enough.

Rows = tuple[tuple[Action, ...], ...]
"""Actions by rank."""


@dataclass(frozen=True, slots=True)
class BatchesInARow:
    """The actions of batches that follow each other without a flush, one stage a rank.

    Micro-batches are counted from the first batch on. Raises `PlanError` for fewer micro-batches than ranks, and
    unless two batches in a row are a valid schedule.
    """

    ranks: int
    micro_batches: int
    """The number of them in one batch."""

    def __post_init__(self) -> None:
        if self.micro_batches < self.ranks:
            raise PlanError(
                f"plan: weight_versions = 2 with {self.micro_batches} micro-batches on {self.ranks} ranks: with "
                "fewer micro-batches than ranks two versions of the weights are not enough",
                remedy=f"set micro_batches = {self.ranks} or more",
            )
        validate(self.schedule(2))

    def batch(self, number: int) -> Rows:
        """Return what each rank does from its first forward pass of batch `number` to that of the next one."""
        begin = number * self.micro_batches
        rows = []
        for rank in range(self.ranks):
            row = []
            for each in range(begin, begin + self.micro_batches):
                row.append(Action(rank, FORWARD, each))
                if each >= self.ahead(rank):
                    row.append(Action(rank, BACKWARD, each - self.ahead(rank)))
            rows.append(tuple(row))
        return tuple(rows)

    def end(self, batches: int) -> Rows:
        """Return the backward passes that are still to come after `batches` batches."""
        last = batches * self.micro_batches
        return tuple(
            tuple(Action(rank, BACKWARD, each) for each in range(last - self.ahead(rank), last))
            for rank in range(self.ranks)
        )

    def schedule(self, batches: int) -> Schedule:
        """Return all actions of `batches` batches, from the first forward to the last backward pass."""
        parts = [*map(self.batch, range(batches)), self.end(batches)]
        rows = tuple(tuple(each for part in parts for each in part[rank]) for rank in range(self.ranks))
        return Schedule("1f1b", batches * self.micro_batches, tuple(range(self.ranks)), rows)

    def position(self, rank: int, action: Action) -> int:
        """Return a number that grows in the order of a rank's actions, however many batches follow."""
        if action.kind == FORWARD:
            return 2 * action.micro_batch
        return 2 * (action.micro_batch + self.ahead(rank)) + 1

    def ahead(self, rank: int) -> int:
        """Return the micro-batches whose backward passes are to come when `rank` begins the next batch."""
        return self.ranks - 1 - rank
