"""ZeRO stage 3: units that are gathered before they run and whose gradients are scattered, as torch's FSDP2 does.

Source: Rajbhandari et al. 2020, section 5.3; Zhao et al. 2023, "PyTorch FSDP". Blocks are gathered for forward and
again for backward, the rest of the model once a pass. While a unit runs, the next one is gathered. On the CPU
sums are waited for, and on accelerators they travel behind backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..candidate import CollectiveCalls
from ..model.profile import ModelProfile
from .buckets import LocalGradient, local_gradients
from .gradients import coded_share
from .layout import RunLayout
from .rates import Rates, Spent
from .stages import StageUnits
from .units import UnitPass, is_block, wait_share

_FACTS = 5
_FACT_BYTES = 8
"""A small message at the end says, in float64, how many passes were made, and which parameters were used."""


@dataclass(frozen=True)
class ShardedUnit:
    """Parameters that are gathered together."""

    nbytes: int
    """Bytes of all ranks' shards, with their padding."""
    gathered_bytes: int
    """The same as they are gathered."""
    count: int
    """Equal units that follow each other."""
    is_root: bool
    unit: int = -1
    """Its number in the profile; -1 for the root."""


@dataclass
class ShardCost:
    """What a stage's shards cost."""

    forward: Spent = field(default_factory=Spent)
    """A pass, as far as computing does not hide it."""
    backward: Spent = field(default_factory=Spent)
    """A pass that is not reduced."""
    reduce: Spent = field(default_factory=Spent)
    """More, in each pass that is."""
    wait: Spent = field(default_factory=Spent)
    """For the slowest rank, in each pass that is reduced."""
    calls: list[CollectiveCalls] = field(default_factory=list)
    sent_bytes: float = 0.0


def sharded_units(profile: ModelProfile, stage: StageUnits, layout: RunLayout) -> list[ShardedUnit]:
    """Return what is gathered together on a stage: its blocks, and the rest."""
    found, rest = [], 0
    for index, count in stage.units:
        unit = profile.units[index]
        one = local_gradients(profile, StageUnits([(index, 1)]), layout, experts=False)
        nbytes = _shard_bytes(one, layout.shards)
        if unit.frozen_bytes:
            nbytes += round(unit.frozen_bytes * layout.gradient_width)
        if is_block(unit, profile) and nbytes:
            uncast = {each.name for each in unit.gradients if unit.uncast_flops and each.divided_by == "expert"}
            matrices = [
                each for each in one if layout.gathers_in_16_bits and each.columns > 1 and each.name not in uncast
            ]
            gathered = nbytes - _shard_bytes(matrices, layout.shards) // 2
            found.append(ShardedUnit(nbytes, gathered, count, is_root=False, unit=index))
        else:
            rest += count * nbytes
    return [ShardedUnit(rest, rest, 1, is_root=True), *found] if rest else found


def _shard_bytes(gradients: Sequence[LocalGradient], ranks: int) -> int:
    """Return the bytes of all shards: rows are divided as `torch.chunk` does, and padded to equal shards."""
    return sum(ranks * -(-each.rows // ranks) * each.columns * each.element_bytes for each in gradients)


def shard_cost(
    profile: ModelProfile, stage: StageUnits, passes: Sequence[UnitPass], layout: RunLayout, rates: Rates
) -> ShardCost:  # fmt: skip
    """Return what stage 3 sends for a stage, in seconds and as a ledger."""
    cost, ranks, copies = ShardCost(), layout.shards, layout.copies
    if layout.replicas == 1:
        return cost
    stride, plan = layout.stride("shard"), layout.plan
    down, up = coded_share(plan.codec), coded_share(plan.weight_codec)
    hidden = not rates.cluster.on_cpus
    reductions = plan.accumulate
    units = sharded_units(profile, stage, layout)
    flags = 0
    for each in units:
        gather = rates.exchange("all_gather", ranks, stride, each.gathered_bytes * up)
        scatter = rates.exchange("reduce_scatter", ranks, stride, each.nbytes * down)
        if copies > 1:
            scatter.add(rates.exchange("all_reduce", copies, stride * ranks, each.nbytes / ranks))
        gathers = 1 if each.is_root else 2
        if hidden:
            # FSDP2 copies messages to parameters, and gradients, as wide as these, to messages.
            copied = rates.moved(2.0 * each.gathered_bytes)
            cost.forward.add(copied, each.count)
            cost.backward.add(copied, 0 if each.is_root else each.count)
            cost.reduce.add(rates.moved(each.gathered_bytes + each.nbytes), each.count)
        cost.calls += [
            CollectiveCalls("all_gather", "shard", ranks, each.gathered_bytes,
                            gathers * each.count * layout.passes, plan.weight_codec),
            CollectiveCalls("reduce_scatter", "shard", ranks, each.nbytes, each.count * reductions, plan.codec),
        ]  # fmt: skip
        if copies > 1:
            cost.calls.append(
                CollectiveCalls("all_reduce", "data", copies, each.nbytes // ranks, each.count * reductions)
            )
        if each.is_root:
            cost.forward.add(gather)
            cost.reduce.add(scatter)
            continue
        made = passes[each.unit]
        forward, backward = made.forward_seconds, made.backward_seconds
        for end, seconds in ((cost.forward, forward), (cost.backward, backward)):
            end.add(rates.beside(gather, seconds), each.count)
        if hidden:
            room = max(0.0, backward - gather.seconds * rates.exchange_slowdown)
            cost.reduce.add(rates.beside(scatter, room), max(0, each.count - 1))
            cost.reduce.add(scatter)
        else:
            cost.reduce.add(scatter, each.count)
            wait = wait_share(profile.units[each.unit], layout.replicas)
            cost.wait.add(rates.measured(wait * made.backward.seconds), each.count)
    for index, count in stage.units:
        flags += count * len(profile.units[index].gradients)
    nbytes = _FACT_BYTES * (_FACTS + flags)
    cost.calls.append(CollectiveCalls("all_reduce", "shard", layout.replicas, nbytes, 1))
    cost.reduce.add(rates.exchange("all_reduce", layout.replicas, stride, nbytes), 1 / reductions)
    return cost
