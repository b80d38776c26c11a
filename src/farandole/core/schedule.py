"""The named schedules.

- ``gpipe`` (Huang et al. 1811.06965): all forward passes, then all backward passes.
- ``1f1b`` (Narayanan et al. 1806.03377, with a flush): backward as soon as possible, so that rank r keeps the
  activations of p - r micro-batches instead of all.
- ``interleaved`` (Narayanan et al. 2104.04473, section 2.2): 1f1b with several stages a rank; the bubble is
  divided by their number.
- ``zb-h1`` (Qi et al. 2401.10241, section 2.1): 1f1b with a divided backward pass; weights fill the bubble.
- ``zb-v`` (Qi et al. 2405.15362, section 4): two stages a rank, the second ones in reverse order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from .schedule_simulation import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, Schedule, validate
from .vocabulary.errors import PlanError
from .vocabulary.rules import chunks_of, require_schedule
from .vocabulary.units import format_bytes

# Layers to stages: consecutive layers, so that the slowest stage is as fast as can be, within a limit of memory.
#
# By dynamic programming over the number of stages and of layers: O(layers^2 x stages), and no split is better.


@dataclass(frozen=True, slots=True)
class LayerCost:
    """What one layer costs with one micro-batch."""

    name: str
    seconds: float
    """Forward and backward."""
    state_bytes: int = 0
    """Parameters, their gradients and the states of the optimizer."""
    activation_bytes: int = 0
    """Kept of one micro-batch from forward to backward."""
    border_bytes: int = 0
    """Travels to this layer if a stage begins with it."""


def partition(
    layers: Sequence[LayerCost], stages: int, *, in_flight: Sequence[int] = (), limit_bytes: int | None = None
) -> list[int]:
    """Return the position of the first layer of each stage but the first.

    If several splits have an equal slowest stage, one with few bytes at the borders is returned.

    Args:
        layers: in the order in which they run.
        stages: how many.
        in_flight: micro-batches whose activations each stage keeps at once; empty: one.
        limit_bytes: of the memory of a stage; None: no limit.

    Raises:
        PlanError: there are fewer layers than stages, or no split is within the limit.
    """
    count = len(layers)
    if count < stages:
        raise PlanError(
            f"pipeline: the model has {count} layers to cut at "
            f"({', '.join(each.name for each in layers[:4])}, ...), and {stages} stages are asked for",
            remedy=f"use at most {count} stages, or name modules inside of a layer in pipeline_cuts",
        )
    kept = list(in_flight) or [1] * stages
    seconds = [0.0, *accumulate(each.seconds for each in layers)]
    states = [0, *accumulate(each.state_bytes for each in layers)]
    activations = [0, *accumulate(each.activation_bytes for each in layers)]

    def nbytes(stage: int, begin: int, end: int) -> int:
        return states[end] - states[begin] + kept[stage] * (activations[end] - activations[begin])

    best: list[tuple[float, int] | None] = [(0.0, 0), *[None] * count]
    """(slowest stage, bytes at borders) of the first so many layers in the stages so far."""
    choices: list[list[int]] = []
    for stage in range(stages):
        following: list[tuple[float, int] | None] = [None] * (count + 1)
        choice = [0] * (count + 1)
        for end in range(stage + 1, count + 1):
            for begin in reversed(range(stage, end)):
                known = following[end]
                if known is not None and seconds[end] - seconds[begin] > known[0]:
                    break  # a longer stage is no better
                before = best[begin]
                if before is None or (limit_bytes is not None and nbytes(stage, begin, end) > limit_bytes):
                    continue
                border = layers[begin].border_bytes if stage else 0
                candidate = (max(before[0], seconds[end] - seconds[begin]), before[1] + border)
                if known is None or candidate <= known:
                    following[end], choice[end] = candidate, begin
        best = following
        choices.append(choice)
    if best[count] is None:
        assert limit_bytes is not None, "without a limit there is a split"
        least = max(states[i + 1] - states[i] + activations[i + 1] - activations[i] for i in range(count))
        raise PlanError(
            f"pipeline: no split into {stages} stages keeps each within {format_bytes(limit_bytes)} "
            f"(the largest layer alone takes {format_bytes(least)} with one micro-batch)",
            remedy="use more stages, smaller micro-batches or recompute",
        )
    cuts, end = [], count
    for stage in reversed(range(1, stages)):
        end = choices[stage][end]
        cuts.append(end)
    return cuts[::-1]


def build_schedule(name: str, ranks: int, micro_batches: int, chunks: int = 0) -> Schedule:
    """Return the schedule `name` for a pipeline of `ranks`, validated.

    Raises:
        PlanError: the name is unknown, or the schedule needs another number of micro-batches.
    """
    require_schedule(name, chunks)
    if ranks < 1 or micro_batches < 1:
        raise PlanError(f"schedule {name!r}: {ranks} ranks and {micro_batches} micro-batches, expected 1 or more")
    each = chunks_of(name, chunks)
    looped = tuple(stage % ranks for stage in range(ranks * each))
    if name == "gpipe":
        actions = [list(_gpipe(rank, micro_batches)) for rank in range(ranks)]
    elif name == "1f1b":
        actions = [list(_one_f_one_b(rank, ranks, micro_batches)) for rank in range(ranks)]
    elif name == "interleaved":
        _require_rounds(ranks, micro_batches)
        actions = [list(_interleaved(rank, ranks, micro_batches, each)) for rank in range(ranks)]
    elif name == "zb-h1":
        actions = [list(_zb_h1(rank, ranks, micro_batches)) for rank in range(ranks)]
    else:
        looped = tuple(range(ranks)) + tuple(reversed(range(ranks)))
        actions = [list(_zb_v(rank, ranks, micro_batches)) for rank in range(ranks)]
    schedule = Schedule(name, micro_batches, looped, tuple(map(tuple, actions)))
    validate(schedule)
    return schedule


def _gpipe(rank: int, micro_batches: int) -> Iterator[Action]:
    for kind in (FORWARD, BACKWARD):
        for each in range(micro_batches):
            yield Action(rank, kind, each)


def _one_f_one_b(rank: int, ranks: int, micro_batches: int) -> Iterator[Action]:
    ahead = min(ranks - 1 - rank, micro_batches)
    for each in range(micro_batches + ahead):
        if each < micro_batches:
            yield Action(rank, FORWARD, each)
        if each >= ahead:
            yield Action(rank, BACKWARD, each - ahead)


def _require_rounds(ranks: int, micro_batches: int) -> None:
    if micro_batches % ranks:
        raise PlanError(
            f'plan: schedule = "interleaved" takes micro-batches in rounds of {ranks}, one a rank, and '
            f"micro_batches = {micro_batches} is no multiple",
            remedy=f"set micro_batches = {-(-micro_batches // ranks) * ranks}",
        )


def _interleaved(rank: int, ranks: int, micro_batches: int, chunks: int) -> Iterator[Action]:
    """Micro-batches go in rounds of `ranks` through one chunk after the other."""
    rounds = [
        (chunk, first + each)
        for first in range(0, micro_batches, ranks)
        for chunk in range(chunks)
        for each in range(ranks)
    ]
    ahead = min((ranks - 1 - rank) * 2 + (chunks - 1) * ranks, len(rounds))
    for step in range(len(rounds) + ahead):
        if step < len(rounds):
            chunk, each = rounds[step]
            yield Action(chunk * ranks + rank, FORWARD, each)
        if step >= ahead:
            chunk, each = rounds[step - ahead]
            yield Action((chunks - 1 - chunk) * ranks + rank, BACKWARD, each)


def _zb_h1(rank: int, ranks: int, micro_batches: int) -> Iterator[Action]:
    """As 1f1b; rank r computes gradients of weights r micro-batches later, and the rest at the end."""
    ahead = min(ranks - 1 - rank, micro_batches)
    weights = 0
    for each in range(micro_batches + ahead):
        if each < micro_batches:
            yield Action(rank, FORWARD, each)
        if each >= ahead:
            yield Action(rank, BACKWARD_INPUT, each - ahead)
            if each - ahead >= rank:
                yield Action(rank, BACKWARD_WEIGHT, weights)
                weights += 1
    for each in range(weights, micro_batches):
        yield Action(rank, BACKWARD_WEIGHT, each)


def _zb_v(rank: int, ranks: int, micro_batches: int) -> Iterator[Action]:
    """Two stages a rank, down (first) and up (second): the rank of the first stage has the last one, too.

    The order of a step with at least 2 p - 1 micro-batches, without those that do not exist.
    """
    first, second = rank, 2 * ranks - 1 - rank
    for action in _zb_v_order(first, second, rank, ranks, max(micro_batches, 2 * ranks - 1)):
        if action.micro_batch < micro_batches:
            yield action


def _zb_v_order(first: int, second: int, rank: int, ranks: int, micro_batches: int) -> Iterator[Action]:
    count: dict[tuple[int, str], int] = {}

    def take(stage: int, kinds: str) -> Iterator[Action]:
        for kind in kinds:
            number = count.get((stage, kind), 0)
            if number < micro_batches:
                count[stage, kind] = number + 1
                yield Action(stage, kind, number)

    for _ in range(2 * (ranks - rank) - 1):
        yield from take(first, FORWARD)
    for _ in range(rank):
        yield from take(second, FORWARD)
        yield from take(first, FORWARD)
    for _ in range(ranks - rank):
        yield from take(second, FORWARD + BACKWARD_INPUT + BACKWARD_WEIGHT)
    while count.get((second, FORWARD), 0) < micro_batches:
        yield from take(first, FORWARD + BACKWARD_INPUT + BACKWARD_WEIGHT)
        yield from take(second, FORWARD + BACKWARD_INPUT + BACKWARD_WEIGHT)
    for _ in range(rank):
        yield from take(first, BACKWARD_INPUT)
        yield from take(second, BACKWARD_INPUT)
    for _ in range(ranks - rank):
        yield from take(first, BACKWARD_INPUT + BACKWARD_WEIGHT)
    for stage in (second, first):
        while count.get((stage, BACKWARD_WEIGHT), 0) < micro_batches:
            yield from take(stage, BACKWARD_WEIGHT)
