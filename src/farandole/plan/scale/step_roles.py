"""A step simulated by roles: only replicas that differ are run, whatever the number of ranks.

[Note: simulated steps] A replica runs its micro-batches by the schedule (core/schedule). A bucket leaves when its
gradients are ready in the slowest replica, and buckets follow each other over the link (core/step_model, the one
recurrence). What follows the exchange (ZeRO's shards, then the optimizer) each rank does by itself, and begins the
next step when it is done. So a step is the time from the end of one to the end of the next, once steps repeat.
Replicas with equal factors and equal begins do the same, so each such class is simulated once: the figures are
those of a simulation of all replicas, to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...core.schedule.actions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT
from ...core.schedule.simulate import ActionSpan, StageTimes
from ...core.step_model.replay import BucketLoad, BucketOnLink, replay_spans
from .step_work import StageWork, StepWork

_STEPS = 3
"""After which steps repeat: begins follow from the step before alone."""


@dataclass(frozen=True)
class ReplicaStep:
    """One replica in one step: seconds by rank of its pipeline."""

    begins: tuple[float, ...]
    """With the batch there."""
    spans: tuple[ActionSpan, ...]
    backward: tuple[tuple[float, float], ...]
    """Begin and end of the last backward pass, which makes the gradients."""
    computed: tuple[float, ...]
    """When nothing is left to compute."""


@dataclass(frozen=True)
class StepTimes:
    """One step of all replicas that were simulated."""

    replicas: tuple[ReplicaStep, ...]
    buckets: tuple[tuple[BucketOnLink, ...], ...]
    """By rank of the pipeline."""
    exchanged: tuple[tuple[float, ...], ...]
    """When a rank has the gradients, and shards: by replica and rank of the pipeline."""
    ends: tuple[tuple[float, ...], ...]
    """When the optimizer has stepped, alike."""

    @property
    def end_seconds(self) -> float:
        """When the last rank is done."""
        return max(map(max, self.ends))


def factors_by_replica(work: StepWork, slow_ranks: Mapping[int, float]) -> dict[tuple[float, ...], int]:
    """Return how many replicas have which factors of their usual computing time, by rank of the pipeline."""
    cells: dict[int, list[float]] = {}
    healthy = (1.0,) * work.degrees.pipeline
    within: dict[tuple[int, int], list[float]] = {}
    for rank, factor in slow_ranks.items():
        within.setdefault(work.cell_of(rank), []).append(factor)
    for (place, replica), factors in within.items():
        own = cells.setdefault(replica, list(healthy))
        usual = [1.0] if len(factors) < work.cell_ranks else []
        own[place] = max([*factors, *usual])
    found: dict[tuple[float, ...], int] = {}
    for each in cells.values():
        found[tuple(each)] = found.get(tuple(each), 0) + 1
    left = work.replicas - len(cells)
    if left:
        found[healthy] = found.get(healthy, 0) + left
    return found


def step_seconds(work: StepWork, slow_ranks: Mapping[int, float] | None = None) -> float:
    """Return the seconds of a step; `slow_ranks`: by rank, how many times its usual time computing takes."""
    return repeated_seconds(work, list(factors_by_replica(work, slow_ranks or {})))


def repeated_seconds(work: StepWork, factors: Sequence[Sequence[float]]) -> float:
    """Return the seconds of a step of replicas with these `factors`, by replica and rank of the pipeline.

    See [Note: simulated steps].
    """
    begins: Sequence[Sequence[float]] = [[0.0] * work.degrees.pipeline for _ in factors]
    ends = [0.0]
    for _ in range(_STEPS):
        times = one_step(work, factors, begins)
        begins = times.ends
        ends.append(times.end_seconds)
    return ends[-1] - ends[-2]


def one_step(
    work: StepWork,
    factors: Sequence[Sequence[float]],
    begins: Sequence[Sequence[float]],
    optimizer_factors: Sequence[Sequence[float]] | None = None,
) -> StepTimes:
    """Return one step of replicas with these factors and begins, both by replica and rank of the pipeline.

    Equal replicas are simulated once. `optimizer_factors`: of the optimizer's step; None: `factors`, too.
    """
    known: dict[tuple[tuple[float, ...], tuple[float, ...]], ReplicaStep] = {}
    replicas = []
    for factor, begin in zip(factors, begins, strict=True):
        key = (tuple(factor), tuple(begin))
        if key not in known:
            known[key] = _replica(work, *key)
        replicas.append(known[key])
    distinct = list(known.values())
    buckets = tuple(_exchange(work, place, distinct) for place in range(work.degrees.pipeline))
    arrived = [_arrived(work, place, distinct, buckets[place]) for place in range(work.degrees.pipeline)]
    exchanged, ends = [], []
    for replica, factor in zip(replicas, optimizer_factors or factors, strict=True):
        done = tuple(
            max(replica.computed[place], arrived[place]) + work.exposed_seconds
            for place in range(work.degrees.pipeline)
        )
        exchanged.append(done)
        ends.append(tuple(at + work.optimizer_seconds * own for at, own in zip(done, factor, strict=True)))
    return StepTimes(tuple(replicas), buckets, tuple(exchanged), tuple(ends))


def _arrived(
    work: StepWork, place: int, replicas: Sequence[ReplicaStep], buckets: Sequence[BucketOnLink]
) -> float:
    """Return when the gradients of a rank of the pipeline are there: no earlier than the slowest replica's."""
    if not work.exchanges:
        return -math.inf
    last = buckets[-1].end_seconds + buckets[-1].decode_seconds if buckets else -math.inf
    return max(last, *(replica.backward[place][1] for replica in replicas))


def _replica(work: StepWork, factors: tuple[float, ...], begins: tuple[float, ...]) -> ReplicaStep:
    schedule = work.schedule
    ready = tuple(at + work.data_seconds for at in begins)
    times = [_times(stage, factors[schedule.stage_ranks[number]]) for number, stage in enumerate(work.stages)]
    simulation = work.simulator.run(times, ready)
    backward = [(at, at) for at in ready]
    computed = list(ready)
    for span in simulation.spans:
        computed[span.rank] = max(computed[span.rank], span.end_seconds)
        if span.action.kind in (BACKWARD, BACKWARD_WEIGHT) or (
            span.action.kind == BACKWARD_INPUT and not schedule.divides_backward
        ):
            backward[span.rank] = (span.begin_seconds, span.end_seconds)
    return ReplicaStep(ready, simulation.spans, tuple(backward), tuple(computed))


def _times(stage: StageWork, factor: float) -> StageTimes:
    return StageTimes(
        stage.forward_seconds * factor + stage.forward_exchange_seconds,
        stage.backward_input_seconds * factor + stage.backward_exchange_seconds,
        stage.backward_weight_seconds * factor,
        stage.send_seconds,
    )


def ready_seconds(replica: ReplicaStep, place: int, share: float) -> float:
    """Return when `share` of the gradients of a rank of the pipeline are ready."""
    begin, end = replica.backward[place]
    return end - (1 - share) * (end - begin)


def _exchange(work: StepWork, place: int, replicas: Sequence[ReplicaStep]) -> tuple[BucketOnLink, ...]:
    loads = [
        BucketLoad(
            bucket.nbytes, bucket.sent_bytes, bucket.rounds,
            max(ready_seconds(replica, place, bucket.ready_share) for replica in replicas),
            cpu_seconds=bucket.codec_seconds, intra_host_seconds=bucket.inside_seconds,
            is_serial=work.is_serial,
        )
        for bucket in work.buckets[place]
    ]  # fmt: skip
    return tuple(replay_spans(loads, work.link, shares_core=work.shares_core))
