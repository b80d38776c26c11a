"""The mean step of ranks whose computing varies.

[Note: steps of varying length] Without a pipeline a step follows from the slowest rank's factor, so it is taken at
levels of the distribution of that factor and averaged. With a pipeline the time of one replica is drawn some
hundred times, each stage with a factor of its own; the slowest of all replicas follows from the mean and the
spread of these by the same tail. What comes after the pipeline (exposed exchange, optimizer) is added as it is.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from ...core.vocabulary.degrees import Degrees
from .noise import Noise, Tail, largest_of
from .step_roles import factors_by_replica, one_step, repeated_seconds
from .step_work import StepWork

_LEVELS = 200
_KNOTS = 17
"""Factors at which the step is simulated; between them it is taken as straight: it bends where exchanges show."""
_DRAWS = 160
_MOST_ACTIONS = 200_000
"""In all draws together: larger pipelines are drawn less often, but `_LEAST_DRAWS` times."""
_LEAST_DRAWS = 24


def noisy_step_seconds(work: StepWork, noise: Noise, slow_ranks: Mapping[int, float] | None = None) -> float:
    """Return the mean seconds of a step. See [Note: steps of varying length].

    `slow_ranks`: by rank, how many times its usual time computing takes; noise comes on top.
    """
    slow = slow_ranks or {}
    factors = list(factors_by_replica(work, slow))
    if noise.is_none:
        return repeated_seconds(work, factors)
    if work.degrees.pipeline == 1:
        return _without_pipeline(work, noise, slow)
    return _with_pipeline(work, noise, slow)


def _without_pipeline(work: StepWork, noise: Noise, slow: Mapping[int, float]) -> float:
    groups = [(1, factor) for factor in slow.values()]
    usual = work.ranks - len(groups)
    groups += [(usual, 1.0)] if usual else []
    largest = [largest_of(noise, groups, (level + 0.5) / _LEVELS) for level in range(_LEVELS)]
    low, high = min(largest), max(largest)
    knots = [low + (high - low) * i / (_KNOTS - 1) for i in range(_KNOTS)] if high > low else [low]
    bare = replace(work, optimizer_seconds=0.0)
    steps = [(knot, repeated_seconds(bare, [(knot,)])) for knot in knots]
    seconds = math.fsum(_between(steps, factor) for factor in largest) / _LEVELS
    return seconds + work.optimizer_seconds * max([1.0, *slow.values()] if usual else slow.values())


def _between(steps: Sequence[tuple[float, float]], factor: float) -> float:
    for (low, first), (high, second) in pairwise(steps):
        if factor <= high:
            return first + (second - first) * (factor - low) / (high - low)
    return steps[-1][1]


def _with_pipeline(work: StepWork, noise: Noise, slow: Mapping[int, float]) -> float:
    classes = factors_by_replica(work, slow)
    # What does not change with the number of replicas is drawn once for all sizes of a job.
    alone = replace(
        work, degrees=replace(Degrees(), pipeline=work.degrees.pipeline), buckets=((),) * work.degrees.pipeline,
        exposed_seconds=0.0, optimizer_seconds=0.0, rank_samples=1,
    )  # fmt: skip
    drawn = [_replica_seconds(alone, factors, noise, work.cell_ranks) for factors in classes]
    tail: Tail = "exponential" if noise.tail == "exponential" else "gaussian"
    of_replicas = Noise(max(each.spread_seconds / each.mean_seconds for each in drawn), tail)
    groups = [(count, each.mean_seconds) for count, each in zip(classes.values(), drawn, strict=True)]
    levels = [(level + 0.5) / _LEVELS for level in range(_LEVELS)]
    slowest = math.fsum(largest_of(of_replicas, groups, level) for level in levels) / _LEVELS
    return repeated_seconds(work, list(classes)) - max(each.even_seconds for each in drawn) + slowest


class _Replica(NamedTuple):
    even_seconds: float
    """Without noise."""
    mean_seconds: float
    spread_seconds: float
    """Standard deviation."""


@lru_cache(maxsize=256)
def _replica_seconds(alone: StepWork, factors: tuple[float, ...], noise: Noise, cell_ranks: int) -> _Replica:
    """Return what the passes of one replica take; `alone` is the work of a single one."""
    draw = random.Random(0)
    begins = [[0.0] * len(factors)]
    draws = max(_LEAST_DRAWS, min(_DRAWS, _MOST_ACTIONS // sum(map(len, alone.schedule.actions))))
    seconds = []
    for _ in range(draws):
        drawn = [own * noise.largest_quantile(draw.random(), cell_ranks) for own in factors]
        seconds.append(max(one_step(alone, [drawn], begins).replicas[0].computed))
    even = max(one_step(alone, [factors], begins).replicas[0].computed)
    return _Replica(even, statistics.fmean(seconds), statistics.stdev(seconds))
