"""From a model, a cluster and a plan to the work of a step, by the cost model's own figures.

[Note: what is simulated and what is not] Passes, transfers and buckets of gradients are simulated, so that a slow
rank, noise or a slow link change what they hide. Exchanges of ZeRO's shards, of experts' gradients and what else a
prediction has are taken from the prediction as it is: what its step takes beyond the simulated one follows the
exchange. So without slow ranks and noise a step takes what the cost model predicts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...core.cluster.cluster import Cluster
from ...core.step_model.link import LinkModel
from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.spec import MOST_ZERO
from ..candidate import Candidate, Prediction
from ..cost.buckets import StageGradients
from ..cost.gradients import Backward, ExchangeGroup, bucket_work
from ..cost.layout import RunLayout
from ..cost.rates import Rates
from ..cost.shards import shard_cost
from ..cost.stages import StageUnits, transfer
from ..cost.step import PlacedModel, place
from ..model.profile import ModelProfile
from .step_roles import step_seconds
from .step_work import GradientBucket, StageWork, StepWork

_IN_LAYERS = ("expert", "context", "tensor")
LEAST_DIFFERENCE = 0.02
"""Share of a step by which the simulation may be longer than the prediction before a warning says it."""


@dataclass(frozen=True)
class PlacedWork:
    """The work of a candidate's step, and what records of it say."""

    work: StepWork
    cuts: tuple[str, ...]
    """First module of each stage but the first."""
    warnings: tuple[str, ...] = ()


def work_of(profile: ModelProfile, cluster: Cluster, candidate: Candidate, prediction: Prediction) -> PlacedWork:
    """Return the work of a step. See [Note: what is simulated and what is not].

    Args:
        profile: the model.
        cluster: its figures; all ranks are like its device.
        candidate: plan, ranks and samples.
        prediction: of the same candidate.

    Raises:
        PlanError: as the cost model raises it.
    """
    layout = RunLayout.of(candidate, cluster.tiers[0].ranks, on_device=not cluster.on_cpus)
    if layout.plan.weight_versions > 1:
        raise PlanError(
            f"plan: weight_versions = {layout.plan.weight_versions}: runs are simulated step by step, and batches "
            "without a flush between them overlap",
            remedy="leave weight_versions out; farandole plan --draw shows two batches in a row",
        )
    rates = Rates(cluster)
    placed = place(profile, layout, rates, {})
    is_sharded = layout.plan.zero == MOST_ZERO
    keeps = (*_sharing(layout), *_IN_LAYERS) if is_sharded else _IN_LAYERS
    operation = "reduce_scatter" if layout.plan.zero else "all_reduce"
    link = rates.link(operation, max(2, layout.replicas), layout.stride("data"))
    busy = rates.exchange_slowdown if layout.degrees.pipeline == 1 else 1.0  # behind a pipeline nothing computes
    work = StepWork(
        degrees=layout.degrees,
        stages=tuple(_stage_work(placed, number, rates) for number in range(len(placed.stages))),
        buckets=_buckets(placed, operation, rates),
        link=LinkModel(link.bytes_per_second / busy, link.latency_seconds),
        schedule_name=layout.plan.schedule,
        micro_batches=layout.passes,
        chunks=layout.plan.chunks,
        keeps_in_step=keeps,
        optimizer_seconds=prediction.terms.get("optimizer", 0.0),
        data_seconds=prediction.terms.get("loader", 0.0),
        shares_core=cluster.codecs_take_compute,
        is_serial=not cluster.on_cpus,
        rank_samples=candidate.global_batch // layout.sample_ranks,
    )
    straggling = prediction.terms.get("straggler", 0.0)
    rest = prediction.seconds - straggling - step_seconds(work)
    warnings = []
    if rest < -LEAST_DIFFERENCE * prediction.seconds:
        warnings.append(
            f"on {candidate.ranks} ranks the simulated step is {-rest / prediction.seconds:.0%} longer than the "
            "predicted one"
        )
    names = [profile.units[stage.units[0][0]].name for stage, _ in placed.stages[1:]]
    return PlacedWork(replace(work, exposed_seconds=max(0.0, rest)), tuple(names), tuple(warnings))


def _sharing(layout: RunLayout) -> tuple[str, ...]:
    """Return the degrees that gather each other's shards in each block; copies of shards meet once a step."""
    if layout.shards < layout.replicas and layout.degrees.shard > 1:
        return ("shard",)
    return ("data", "shard")


def _stage_work(placed: PlacedModel, number: int, rates: Rates) -> StageWork:
    stage, _ = placed.stages[number]
    forward = inputs = weights = forward_exchange = backward_exchange = 0.0
    for index, count in stage.units:
        made = placed.passes[index]
        part = made.backward.seconds * made.weight_share
        forward += count * made.forward.seconds
        inputs += count * (made.backward.seconds - part + made.recompute.seconds)
        weights += count * part
        forward_exchange += count * made.exposed(backward=False)
        backward_exchange += count * made.exposed(backward=True)
    layout = placed.layout
    if layout.plan.zero == MOST_ZERO:
        shards = shard_cost(placed.profile, stage, placed.passes, layout, rates)
        forward_exchange += shards.forward.seconds
        backward_exchange += shards.backward.seconds
    send = 0.0
    if number + 1 < len(placed.stages) and placed.owners[number + 1] != placed.owners[number]:
        send = transfer(placed.profile.units[stage.units[-1][0]], layout, rates)[0].seconds
    return StageWork(forward, inputs, weights, forward_exchange, backward_exchange, send)


def _buckets(placed: PlacedModel, operation: str, rates: Rates) -> tuple[tuple[GradientBucket, ...], ...]:
    """Return the buckets of each rank of the pipeline; none where each pass exchanges, or shards travel."""
    layout, plan = placed.layout, placed.layout.plan
    none: tuple[tuple[GradientBucket, ...], ...] = ((),) * layout.degrees.pipeline
    if plan.zero == MOST_ZERO or (plan.zero == 2 and layout.passes > 1) or layout.replicas == 1:
        return none
    found: list[tuple[GradientBucket, ...]] = []
    for rank in range(layout.degrees.pipeline):
        mine: list[GradientBucket] = []
        for number, owner in enumerate(placed.owners):
            if owner == rank:
                mine += _of_stage(placed, placed.stages[number], operation, rates)
        found.append(tuple(sorted(mine, key=lambda bucket: bucket.ready_share)))
    return tuple(found)


def _of_stage(
    placed: PlacedModel, stage: tuple[StageUnits, StageGradients], operation: str, rates: Rates
) -> list[GradientBucket]:
    layout = placed.layout
    backward = _backward(placed, stage[0])
    group = ExchangeGroup.of(layout, layout.replicas)
    found, before = [], 0.0
    for bucket in stage[1].buckets:
        asked = bucket_work(bucket, group, rates, operation=operation, route=layout.plan.route)
        share = backward.ready(bucket) / backward.seconds if backward.seconds else 1.0
        ready = 1.0 if layout.degrees.pipeline > 1 else min(1.0, share)
        found.append(
            GradientBucket(
                bucket.gradient_bytes, asked.sent.sent_bytes, asked.sent.rounds, min(before, ready), ready,
                asked.codec_seconds, asked.inside.seconds,
            )
        )  # fmt: skip
        before = ready
    return found


def _backward(placed: PlacedModel, stage: StageUnits) -> Backward:
    begins, each, so_far = [], [], 0.0
    for index, count in reversed(stage.units):
        begins.append(so_far)
        each.append(placed.passes[index].backward_seconds)
        so_far += count * each[-1]
    return Backward(so_far, begins, each)
