"""Refining a plan: where its pipeline is cut, which blocks are computed again, and whether tokens stay whole.

[Note: recomputation as a knapsack] A stage that is over the limit by so many bytes has to give them up: each block
that is computed again gives its activations, but for its input, and costs its forward pass. Which ones cost least
is a knapsack problem, solved by dynamic programming over the bytes in bins (Herrmann et al. 2019, "Optimal
checkpointing for heterogeneous chains", have the general one). Both refinements only propose: what counts is the
prediction of the plan that has them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...core.cluster import Cluster
from ...core.schedule import LayerCost, partition
from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.rules import MOST_ZERO, chunks_of
from ...core.vocabulary.spec import Plan
from ..candidate import Candidate
from ..cost.stages import short_schedule
from ..cost.units import is_block
from ..profile import ModelProfile, name_of
from .bounds import pass_seconds
from .result import PredictedPlan

_BINS = 256


@dataclass(frozen=True)
class Layer:
    """One unit of the profile, unfolded, with what it costs a rank of this plan for one micro-batch."""

    name: str
    is_block: bool
    forward_seconds: float
    backward_seconds: float
    state_bytes: int
    saved_bytes: int
    output_bytes: int


def refined(
    profile: ModelProfile, cluster: Cluster, option: PredictedPlan, limit_bytes: int, fixed: Mapping[str, Any]
) -> Iterator[Candidate]:
    """Yield plans that may be better than `option`: with other cuts, fewer blocks computed again, whole tokens."""
    candidate = option.candidate
    layers = layers_of_plan(profile, cluster, candidate)
    plan = candidate.plan
    fits = option.prediction.peak_bytes <= limit_bytes
    if fits and plan.sequence_parallel and "sequence_parallel" not in fixed:  # small sums cost less in one
        yield replace(candidate, plan=replace(plan, sequence_parallel=False))
    if plan.pipeline != 1 and "pipeline_cuts" not in fixed:
        cuts = best_cuts(layers, candidate, limit_bytes)
        if cuts is not None:
            yield replace(candidate, plan=replace(plan, pipeline_cuts=tuple(layers[each].name for each in cuts)))
    if (
        plan.recompute == Plan.recompute
        and "recompute" not in fixed
        and option.prediction.peak_bytes > limit_bytes
        and not profile.fails_in("bf16-weights" if plan.bf16_parameters else plan.precision, "blocks")
    ):
        yield from _recomputing(layers, option, limit_bytes)


def layers_of_plan(profile: ModelProfile, cluster: Cluster, candidate: Candidate) -> list[Layer]:
    """Return the layers in the order in which they run, as one rank of `candidate` has them."""
    plan = candidate.plan
    tensor, context = int(plan.tensor), int(plan.context)
    samples = micro_batch_of(candidate)
    half = 1.0 if plan.precision == "fp32" else 0.5
    sharing = 1 if plan.zero < MOST_ZERO else max(1, int(plan.shard) if plan.shard != 1 else int(plan.data))
    states = 1 if not plan.zero else max(1, int(plan.data))
    layers: list[Layer] = []
    for unit in profile.units:
        forward, backward = pass_seconds(unit, cluster, plan.precision)
        parameters = float(unit.parameters)
        if unit.tensor is not None:
            parameters -= unit.tensor.parameters * (1 - 1 / tensor)
        if unit.expert is not None:
            parameters -= unit.expert.parameters * (1 - 1 / int(plan.expert))
        state = parameters * (8 / sharing + profile.optimizer_state_bytes / states)
        divided = tensor * context
        layers += [
            Layer(
                name_of(unit.name, number),
                is_block(unit, profile),
                forward * samples / divided,
                backward * samples / divided,
                round(state),
                round(unit.saved_bytes * samples * half / divided),
                round(unit.output_bytes * samples * half / context),
            )
            for number in range(unit.count)
        ]
    return layers


def micro_batch_of(candidate: Candidate) -> int:
    """Return the samples of one pass of a rank."""
    plan = candidate.plan
    ranks = candidate.ranks // (int(plan.tensor) * int(plan.context) * int(plan.pipeline))
    return candidate.global_batch // (ranks * passes_of(candidate))


def passes_of(candidate: Candidate) -> int:
    """Return the passes of a step on one rank."""
    plan = candidate.plan
    if plan.pipeline != 1:
        return plan.micro_batches or 2 * int(plan.pipeline)
    return max(plan.accumulate, plan.micro_batches, 1)


def best_cuts(layers: Sequence[Layer], candidate: Candidate, limit_bytes: int) -> list[int] | None:
    """Return the layer that each stage but the first begins with; None if no split is within the limit."""
    plan = candidate.plan
    schedule, kept = short_schedule(plan.schedule, int(plan.pipeline), passes_of(candidate), plan.chunks)
    costs = [
        LayerCost(
            each.name, each.forward_seconds + each.backward_seconds, each.state_bytes,
            each.output_bytes if plan.recompute != Plan.recompute and each.is_block else each.saved_bytes,
            layers[number - 1].output_bytes if number else 0,
        )
        for number, each in enumerate(layers)
    ]  # fmt: skip
    each_chunk = chunks_of(plan.schedule, plan.chunks)
    by_stage = [max(1, math.ceil(kept[rank] / each_chunk)) for rank in schedule.stage_ranks]
    try:
        return partition(costs, schedule.stages, in_flight=by_stage, limit_bytes=limit_bytes // each_chunk)
    except PlanError:
        return None


def _recomputing(layers: Sequence[Layer], option: PredictedPlan, limit_bytes: int) -> Iterator[Candidate]:
    """Yield plans that compute just so many blocks again, with growing margins."""
    candidate = option.candidate
    plan = candidate.plan
    kept: Sequence[int] = [1]
    stages = [list(range(len(layers)))]
    if plan.pipeline != 1:
        if chunks_of(plan.schedule, plan.chunks) > 1:
            return
        cuts = best_cuts(layers, candidate, 2**62)
        if cuts is None:
            return
        ends = [0, *cuts, len(layers)]
        stages = [list(range(ends[i], ends[i + 1])) for i in range(len(ends) - 1)]
        kept = short_schedule(plan.schedule, int(plan.pipeline), passes_of(candidate), plan.chunks).kept
    for margin in (1.0, 1.15, 1.5):
        names: list[str] = []
        for number, (stage, copies) in enumerate(zip(stages, kept, strict=True)):
            memory = option.prediction.memory[min(number, len(option.prediction.memory) - 1)]
            excess = (memory.total_bytes - limit_bytes) * margin
            blocks = [layers[each] for each in stage if layers[each].is_block]
            again = max((each.saved_bytes for each in blocks), default=0)
            items = [((each.saved_bytes - each.output_bytes) * copies, each.forward_seconds) for each in blocks]
            chosen = cheapest(items, excess + again if excess > 0 else 0)
            if chosen is None:
                return
            names += [blocks[each].name for each in chosen]
        if names:
            yield replace(candidate, plan=replace(plan, recompute=tuple(names)))


def cheapest(items: Sequence[tuple[float, float]], needed: float) -> list[int] | None:
    """Return which (bytes, cost) items give at least `needed` bytes at the least cost; None if all give less.

    By dynamic programming over bytes in 256 bins: rounded down, so the bytes are never fewer than needed.

    >>> cheapest([(6, 5.0), (5, 3.0), (5, 3.0)], 9)
    [1, 2]
    """
    if needed <= 0:
        return []
    if sum(nbytes for nbytes, _ in items) < needed:
        return None
    bins = [int(max(nbytes, 0.0) * _BINS / needed) for nbytes, _ in items]
    best: list[tuple[float, tuple[int, ...]] | None] = [(0.0, ()), *[None] * _BINS]
    for number, (_, cost) in enumerate(items):
        if not bins[number]:
            continue
        for have in range(_BINS, -1, -1):
            known = best[have]
            if known is None:
                continue
            reached = min(_BINS, have + bins[number])
            new = (known[0] + cost, (*known[1], number))
            old = best[reached]
            if old is None or new[0] < old[0]:
                best[reached] = new
    full = best[_BINS]
    return list(full[1]) if full is not None else list(range(len(items)))
