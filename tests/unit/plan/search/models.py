"""A model and clusters with round figures, and a predictor whose arithmetic a reader can follow."""

from __future__ import annotations

from dataclasses import replace

from farandole.core.cluster import (
    OPERATIONS,
    Cluster,
    CodecCost,
    Coefficient,
    CollectiveCost,
    ComputeRate,
    Device,
    Tier,
)
from farandole.core.link import ring_factor
from farandole.core.vocabulary.codec_spec import NONE
from farandole.core.vocabulary.errors import PlanError
from farandole.core.vocabulary.spec import USUAL_BUCKET_BYTES
from farandole.plan.candidate import Candidate, Prediction, Term
from farandole.plan.memory import ActivationFacts, MemoryByCategory, ModelFacts, OptimizerFacts, WeightFacts
from farandole.plan.profile import (
    AttentionFacts,
    ExpertFacts,
    ModelProfile,
    ModelUnit,
    TensorFacts,
    UnitGradient,
)
from farandole.plan.search.refine import micro_batch_of, passes_of


def make_profile(*, blocks: int = 8, experts: int = 0, width: int = 512, saved: float = 16.0) -> ModelProfile:
    """Return a transformer's profile: an embedding, blocks that save `saved` of their inputs, a head."""
    parameters = 12 * width * width
    embedding = _unit("embedding", 1, 1000 * width, flops=0.0, saved=4.0 * 128 * width)
    block = _unit("layers.0", blocks, parameters, flops=2.0 * parameters * 128, saved=saved * 4 * 128 * width)
    block = replace(
        block,
        tensor=TensorFacts(
            8, parameters, block.forward_flops, 0.75 * block.saved_bytes, 4.0 * 128 * width, tokens=128
        ),
        is_block=True,
        attention=AttentionFacts(8, 2 * 4.0 * 128 * width, 128, block.saved_bytes),
        expert=ExpertFacts(experts, parameters // 2, block.forward_flops / 2, 4.0 * 128 * width)
        if experts
        else None,
    )
    head = _unit("head", 1, 1000 * width, flops=2.0 * 1000 * width * 128, saved=4.0 * 128 * 1000)
    units = (embedding, block, head)
    return ModelProfile(
        name="a transformer", units=units, samples=4, batch_bytes=1024.0, memory=_facts(units), optimizer="adamw",
        optimizer_state_bytes=8.0, optimizer_moved_bytes=28.0, blocks=blocks,
    )  # fmt: skip


def make_cluster(
    *, ranks: int = 8, inside: int = 4, rate: float = 1e9, memory: float = 16e9, codecs: bool = False
) -> Cluster:
    """Return hosts of `inside` ranks each; their links have `rate` bytes per second, those inside ten times it."""
    tiers = [_tier("host", inside, 10 * rate, 1e-5)] if inside < ranks else []
    device = Device(
        "a device with CPUs", _figure(memory), _figure(1e11), _figure(5e-6),
        {"fp32": (ComputeRate(1e9, _figure(1e12)),), "bf16": (ComputeRate(1e9, _figure(4e12)),)},
    )  # fmt: skip
    return Cluster(
        "a cluster", device, (*tiers, _tier("network", ranks, rate, 5e-5)),
        {"int8": CodecCost(_figure(1e-10), 0.26), "bf16": CodecCost(_figure(5e-11), 0.5)} if codecs else {},
    )  # fmt: skip


def predict_plainly(profile: ModelProfile, cluster: Cluster, candidate: Candidate) -> Prediction:
    """Predict by few lines of arithmetic: every key that the search chooses has an effect."""
    plan, passes, samples = candidate.plan, passes_of(candidate), micro_batch_of(candidate)
    tensor, context, pipeline, data = (int(getattr(plan, n)) for n in ("tensor", "context", "pipeline", "data"))
    replicas = candidate.ranks // (tensor * pipeline)
    if (
        plan.pipeline_cuts
        and len(plan.pipeline_cuts) != pipeline - 1
        and plan.schedule in ("gpipe", "1f1b", "zb-h1")
    ):
        raise PlanError("a wrong number of cuts")
    speed = {"fp32": 1e12, "bf16": 4e12, "fp16": 4e12}[plan.precision]
    forward = sum(unit.count * unit.forward_flops for unit in profile.units) / speed
    compute = 3 * forward * samples * passes / (tensor * context * pipeline) + 1e-4 * passes
    again = forward * samples * passes / (tensor * context * pipeline) if plan.recompute != "none" else 0.0
    if isinstance(plan.recompute, tuple):
        again *= len(plan.recompute) / profile.blocks
    bubble = (pipeline - 1) * compute / passes / (2 if plan.schedule == "zb-v" else 1)
    nbytes = 4 * profile.parameters / (tensor * pipeline)
    link = cluster.tier_of(replicas, tensor).collectives["all_reduce"]
    ratio = 1.0 if plan.codec == NONE else cluster.codecs[plan.codec].ratio
    exchange = ring_factor(replicas) * nbytes * ratio / link.bytes_per_second.value if replicas > 1 else 0.0
    bucket_bytes = plan.bucket_bytes or USUAL_BUCKET_BYTES
    buckets = max(1.0, nbytes / bucket_bytes)
    exchange += (buckets * link.latency_seconds.value + bucket_bytes / 1e10) if replicas > 1 else 0.0
    exchange *= 1.5 * passes if plan.zero == 3 else 1.05 if plan.zero else 1.0
    terms: dict[Term, float] = {"compute": compute, "recompute": again, "bubble": bubble}
    terms["data"] = max(0.3 * exchange, exchange - compute)
    terms["tensor"] = passes * 0.002 * (tensor - 1) * (10 if tensor > cluster.tiers[0].ranks else 1)
    terms["context"] = passes * 0.001 * (context - 1)
    terms["expert"] = passes * 0.001 * (int(plan.expert) - 1)
    seconds = sum(terms.values())
    memory = _memory(profile, candidate, data)
    return Prediction(seconds, 0.9 * seconds, 1.1 * seconds, terms, memory, exchange, ())


def _memory(profile: ModelProfile, candidate: Candidate, data: int) -> tuple[MemoryByCategory, ...]:
    plan, samples = candidate.plan, micro_batch_of(candidate)
    tensor, context, pipeline = (int(getattr(plan, name)) for name in ("tensor", "context", "pipeline"))
    share = int(plan.shard) if plan.shard != 1 else data
    share *= int(plan.expert) * context
    weights = 4 * profile.parameters / (tensor * pipeline)
    saved = sum(unit.count * unit.saved_bytes for unit in profile.units) * samples / (tensor * context)
    if plan.recompute == "blocks":
        saved *= 0.1
    elif isinstance(plan.recompute, tuple):
        saved *= 1 - 0.9 * len(plan.recompute) / profile.blocks
    return (
        MemoryByCategory(
            round(weights / (share if plan.zero == 3 else 1)), round(weights / (share if plan.zero >= 2 else 1)),
            round(2 * weights / (share if plan.zero else 1)), round(saved),
            2 * (plan.bucket_bytes or USUAL_BUCKET_BYTES),
        ),
    ) * pipeline  # fmt: skip


def _unit(name: str, count: int, parameters: int, *, flops: float, saved: float) -> ModelUnit:
    return ModelUnit(
        name=name, kind="Block", count=count, gradients=(UnitGradient(f"{name}.weight", parameters // 64, 64),),
        frozen_bytes=0, forward_flops=flops, backward_flops=2 * flops, operations=20, moved_bytes=saved,
        saved_bytes=saved, output_bytes=4.0 * 128 * 512,
    )  # fmt: skip


def _facts(units: tuple[ModelUnit, ...]) -> ModelFacts:
    parameters = sum(unit.count * unit.parameters for unit in units)
    saved = round(4 * sum(unit.count * unit.saved_bytes for unit in units))
    weights = WeightFacts(4 * parameters, 0, 4 * parameters, parameters, 20, 4 * units[1].parameters,
                          8 * units[0].parameters, 4 * units[1].parameters)  # fmt: skip
    return ModelFacts(
        {"fp32": weights, "bf16": weights},
        {"fp32": OptimizerFacts(8.0, 4.0, 4.0, True), "bf16": OptimizerFacts(8.0, 4.0, 4.0, True)},
        {
            ("fp32", "none"): ActivationFacts(saved, 0, saved),
            ("fp32", "blocks"): ActivationFacts(saved // 10, 0, saved // 10 + round(4 * units[1].saved_bytes)),
        },
    )


def _tier(name: str, ranks: int, rate: float, latency: float) -> Tier:
    cost = CollectiveCost(_figure(latency), _figure(rate))
    return Tier(name, ranks, dict.fromkeys(OPERATIONS, cost))


def _figure(value: float) -> Coefficient:
    return Coefficient(value, "measured", 0.9 * value, 1.1 * value)
