"""Layers to stages: consecutive layers, so that the slowest stage is as fast as can be, within a limit of memory.

By dynamic programming over the number of stages and of layers: O(layers^2 x stages), and no split is better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..vocabulary.errors import PlanError
from ..vocabulary.units import format_bytes


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
