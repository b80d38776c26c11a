"""Profiles and clusters by hand, for tests of the cost model."""

from __future__ import annotations

from dataclasses import replace

from farandole.core.cluster import (
    OPERATIONS,
    Cluster,
    Coefficient,
    CollectiveCost,
    ComputeRate,
    Device,
    Tier,
)
from farandole.plan.memory import ActivationFacts, ModelFacts, OptimizerFacts, WeightFacts
from farandole.plan.profile import (
    AttentionFacts,
    ExpertFacts,
    ModelProfile,
    ModelUnit,
    TensorFacts,
    UnitGradient,
    UnitTimes,
)

PRECISIONS = {"fp32": 4, "bf16": 4, "bf16-weights": 2}


def transformer(
    layers: int = 4, hidden: int = 64, sequence: int = 32, heads: int = 4, vocabulary: int = 128, *,
    forward_seconds: float | None = None, experts: int = 0,
) -> ModelProfile:  # fmt: skip
    """A decoder: an embedding, equal layers, and a head, with Korthikanti's activations.

    `forward_seconds`: of a sample and a layer; backward takes twice as long. None: not measured.
    """
    token = float(sequence * hidden)
    attention = 4.0 * sequence * token
    inner = 4 * hidden
    saved = 2.0 * token * (34 + 5 * heads * sequence / hidden)
    gradients: tuple[UnitGradient, ...] = (
        UnitGradient("layers.0.down.bias", hidden, 1),
        UnitGradient("layers.0.down.weight", hidden, inner, divided_by="tensor"),
        UnitGradient("layers.0.up.bias", inner, 1, divided_by="tensor"),
        UnitGradient("layers.0.up.weight", inner, hidden, divided_by="tensor"),
        UnitGradient("layers.0.norm.weight", hidden, 1),
        UnitGradient("layers.0.out.weight", hidden, hidden, divided_by="tensor"),
        UnitGradient("layers.0.qkv.weight", 3 * hidden, hidden, divided_by="tensor"),
    )
    mixture = None
    if experts:
        gradients = (*gradients[4:], *(
            UnitGradient(f"layers.0.experts.{name}", experts, hidden * inner, divided_by="expert")
            for name in ("down", "up")
        ))  # fmt: skip
        mixture = ExpertFacts(experts, 2 * experts * hidden * inner, 16.0 * token * hidden, 4 * token)
    products = 24.0 * token * hidden + attention
    times = None
    if forward_seconds is not None:
        times = UnitTimes(0.0, forward_seconds, 0.0, 2 * forward_seconds, (1, 64))
    layer = ModelUnit(
        name="layers.0", kind="Layer", count=layers, gradients=gradients, frozen_bytes=0, forward_flops=products,
        backward_flops=2 * products, operations=20, moved_bytes=40 * token, saved_bytes=saved,
        output_bytes=4 * token,
        tensor=TensorFacts(
            heads, sum(each.rows * each.columns for each in gradients if each.divided_by == "tensor"), products,
            saved - 20 * token, 4 * token,
        ),
        expert=mixture, attention=AttentionFacts(heads, 8 * token, sequence, 10.0 * heads * sequence * sequence),
        times=times,
    )  # fmt: skip
    free = None if forward_seconds is None else UnitTimes(0.0, 0.0, 0.0, 0.0, (1, 64))
    embedding = ModelUnit(
        name="embedding", kind="Embedding", count=1,
        gradients=(UnitGradient("embedding.weight", vocabulary, hidden),), frozen_bytes=0,
        forward_flops=0.0, backward_flops=0.0, operations=1,
        moved_bytes=8 * token, saved_bytes=0.0,
        output_bytes=4 * token, times=free,
    )  # fmt: skip
    flops = 2.0 * token * vocabulary
    head = ModelUnit(
        name="head", kind="Linear", count=1, gradients=(UnitGradient("head.weight", vocabulary, hidden),),
        frozen_bytes=0, forward_flops=flops, backward_flops=2 * flops, operations=3,
        moved_bytes=8.0 * sequence * vocabulary,
        saved_bytes=4.0 * sequence * vocabulary, output_bytes=4.0, times=free,
    )  # fmt: skip
    units = (embedding, layer, head)
    return ModelProfile(
        name="decoder", units=units, samples=2, batch_bytes=8.0 * sequence, memory=memory_facts(units, samples=2),
        optimizer="adamw", optimizer_state_bytes=8.0, optimizer_moved_bytes=28.0, blocks=layers,
    )  # fmt: skip


def memory_facts(units: tuple[ModelUnit, ...], samples: int) -> ModelFacts:
    """Facts of memory that follow from units: Adam, no temporaries."""
    parameters = sum(unit.count * unit.parameters for unit in units)
    tensors = sum(unit.count * len(unit.gradients) for unit in units)
    blocks = [unit for unit in units if unit.count > 1]
    inside = sum(unit.count * unit.parameters for unit in blocks)
    largest = max(each.rows * each.columns for unit in units for each in unit.gradients)
    saved = sum(unit.count * unit.saved_bytes for unit in units) * samples
    again = (
        sum(unit.count * (unit.output_bytes if unit.count > 1 else unit.saved_bytes) for unit in units) * samples
    )
    weights, optimizer, activations = {}, {}, {}
    for precision, element in PRECISIONS.items():
        weights[precision] = WeightFacts(
            element * parameters, 0, element * parameters, parameters, tensors, element * largest,
            element * (parameters - inside), element * max((unit.parameters for unit in blocks), default=0),
        )  # fmt: skip
        optimizer[precision] = OptimizerFacts(2.0 * element, 0.0, 0.0, updates_at_once=False)
        width = 1.0 if precision == "fp32" else 0.5
        activations[precision, "none"] = ActivationFacts(round(width * saved), 0, round(width * saved))
        most = max((unit.saved_bytes for unit in blocks), default=0.0) * samples
        activations[precision, "blocks"] = ActivationFacts(round(width * again), 0, round(width * (again + most)))
    return ModelFacts(weights, optimizer, activations)


def cluster_of(
    *sizes: int, bytes_per_second: tuple[float, ...] = (1e9, 1e8), latency_seconds: float = 1e-5,
    flops_per_second: float = 1e11, name: str = "cpu",
) -> Cluster:  # fmt: skip
    """A cluster whose tiers have so many ranks each; every operation has the bandwidth of its tier."""
    device = Device(
        name, Coefficient(64e9), Coefficient(2e10), Coefficient(5e-6),
        {"fp32": (ComputeRate(1e6, Coefficient(flops_per_second)),),
         "bf16": (ComputeRate(1e6, Coefficient(2 * flops_per_second)),)},
    )  # fmt: skip
    tiers = []
    for i, ranks in enumerate(sizes):
        speed = bytes_per_second[min(i, len(bytes_per_second) - 1)]
        cost = CollectiveCost(Coefficient(latency_seconds, "measured"), Coefficient(speed, "measured"))
        tiers.append(Tier(f"tier {i}", ranks, dict.fromkeys(OPERATIONS, cost)))
    return Cluster("by hand", device, tuple(tiers))


def with_tiers(cluster: Cluster, speed: float) -> Cluster:
    """The same with links that have `speed` times the bandwidth."""
    tiers = []
    for tier in cluster.tiers:
        costs = {
            name: replace(
                each, bytes_per_second=replace(each.bytes_per_second, value=speed * each.bytes_per_second.value)
            )
            for name, each in tier.collectives.items()
        }
        tiers.append(replace(tier, collectives=costs))
    return replace(cluster, tiers=tuple(tiers))
