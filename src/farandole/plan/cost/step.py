"""A step, put together: passes on stages, what is exchanged behind and after them, the optimizer, and the rest."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from ...core.cluster import collective_work
from ...core.schedule_simulation import StageTimes
from ...core.vocabulary.rules import MOST_ZERO
from ..candidate import CollectiveCalls, Term
from ..profile import ModelProfile
from .buckets import StageGradients, stage_gradients
from .gradients import (
    Backward,
    ExchangeGroup,
    GradientCost,
    ShardCost,
    calls_of,
    coded_share,
    exchange_gradients,
    gather_rows,
    shard_cost,
)
from .layout import RunLayout
from .rates import Rates, Spent
from .stages import StageUnits, cut, pipeline_step, stage_owners, transfer
from .units import UnitPass, edges_of_tokens, pass_of

_DTENSOR_STARTS = 4.0
"""Starting an operation on a DTensor, which stage 3 has, over one on a tensor. Measured on one core, torch 2.13:
AdamW takes 335 microseconds instead of 53 for 64 elements, and 205 instead of 60 for 18,432."""


@dataclass(frozen=True)
class PlacedModel:
    """Which units each stage has, what a pass takes on them, and the buckets of their gradients."""

    profile: ModelProfile
    layout: RunLayout
    stages: list[tuple[StageUnits, StageGradients]]
    owners: tuple[int, ...]
    """The place in the pipeline of each stage."""
    passes: list[UnitPass]
    """By unit of the profile."""

    def again(self, rates: Rates) -> PlacedModel:
        """Return the same stages with the passes at other figures."""
        return replace(self, passes=passes_of(self.profile, self.layout, rates))


@dataclass
class CostedStep:
    """A step in seconds by term, with its ledger."""

    terms: dict[Term, float] = field(default_factory=dict)
    features: dict[str, float] = field(default_factory=dict)
    calls: list[CollectiveCalls] = field(default_factory=list)
    sent_bytes: float = 0.0

    @property
    def seconds(self) -> float:
        """The whole step: the sum of its terms."""
        return sum(self.terms.values())

    def add(self, term: Term, spent: Spent, times: float = 1.0) -> None:
        """Add `times` times what was spent to a term."""
        if spent.seconds and times:
            self.terms[term] = self.terms.get(term, 0.0) + times * spent.seconds
            for name, count in spent.features.items():
                self.features[name] = self.features.get(name, 0.0) + times * count


GradientCache = dict[Hashable, StageGradients]


def passes_of(profile: ModelProfile, layout: RunLayout, rates: Rates) -> list[UnitPass]:
    """Return a pass of each unit."""
    return [pass_of(unit, profile, layout, rates) for unit in profile.units]


def place(profile: ModelProfile, layout: RunLayout, rates: Rates, cache: GradientCache) -> PlacedModel:
    """Return where the parts of the model are. `cache`: buckets of other candidates, of this profile."""
    passes = passes_of(profile, layout, rates)
    stages = []
    for stage in cut(profile, passes, layout):
        key = _gradient_key(stage, layout)
        if key not in cache:
            cache[key] = stage_gradients(profile, stage, layout)
        stages.append((stage, cache[key]))
    return PlacedModel(profile, layout, stages, stage_owners(layout), passes)


def _gradient_key(stage: StageUnits, layout: RunLayout) -> Hashable:
    """Return all that the gradients of a stage depend on."""
    plan, degrees = layout.plan, layout.degrees
    return (
        tuple(stage.units), degrees.tensor, degrees.expert, layout.replicas, layout.expert_replicas, plan.zero,
        plan.bucket_bytes, plan.first_bucket_bytes, plan.codec, tuple(plan.codec_for.items()),
        layout.gradient_width,
    )  # fmt: skip


def costed_step(placed: PlacedModel, rates: Rates) -> CostedStep:
    """Return the step by term. Terms are disjoint: an exchange counts as far as nothing hides it."""
    layout, step = placed.layout, CostedStep()
    parts = [_part_of_rank(placed, place, rates) for place in range(layout.degrees.pipeline)]
    if layout.degrees.pipeline == 1:
        busiest = parts[0]
        _add_passes(step, busiest, layout.passes)
    else:
        busiest = _add_pipeline(step, placed, parts, rates)
    _add_after(step, parts, layout)
    _add_rest(step, placed, rates)
    step.calls = _merged(busiest.calls)
    step.sent_bytes = _sent(step.calls)
    return step


@dataclass
class _RankPart:
    """What one rank of a pipeline does in a pass, and behind the passes."""

    stages: list[int]
    terms: dict[Term, Spent] = field(default_factory=dict)
    """What one pass takes."""
    forward: dict[int, float] = field(default_factory=dict)
    """Seconds of one pass, by stage."""
    backward: dict[int, float] = field(default_factory=dict)
    weight_seconds: dict[int, float] = field(default_factory=dict)
    """What of `backward` may be done later."""
    after: dict[Term, Spent] = field(default_factory=dict)
    """Once a step, behind the passes."""
    calls: list[CollectiveCalls] = field(default_factory=list)

    def add(self, term: Term, spent: Spent, times: float = 1.0) -> None:
        """Add to a pass."""
        if spent.seconds:
            self.terms.setdefault(term, Spent()).add(spent, times)

    def add_after(self, term: Term, spent: Spent, times: float = 1.0) -> None:
        """Add behind the passes."""
        if spent.seconds:
            self.after.setdefault(term, Spent()).add(spent, times)

    @property
    def after_seconds(self) -> float:
        """Behind the passes."""
        return sum(each.seconds for each in self.after.values())


def _part_of_rank(placed: PlacedModel, rank: int, rates: Rates) -> _RankPart:
    layout, plan = placed.layout, placed.layout.plan
    part = _RankPart([stage for stage, owner in enumerate(placed.owners) if owner == rank])
    for number in part.stages:
        stage, gradients = placed.stages[number]
        _add_units(part, number, stage, placed, rates)
        if plan.zero == MOST_ZERO:
            _add_shards(part, number, shard_cost(placed.profile, stage, placed.passes, layout, rates), layout)
        _add_gradients(part, number, gradients, placed, rates)
    return part


def _add_units(part: _RankPart, number: int, stage: StageUnits, placed: PlacedModel, rates: Rates) -> None:
    forward = backward = weights = 0.0
    for index, count in stage.units:
        made = placed.passes[index]
        part.add("compute", made.forward, count)
        part.add("compute", made.backward, count)
        part.add("recompute", made.recompute, count)
        for term, (there, back) in made.exchanges.items():
            part.add(term, there, count)
            part.add(term, back, count)
        forward += count * made.forward_seconds
        backward += count * made.backward_seconds
        weights += count * made.backward.seconds * made.weight_share
        part.calls += [replace(each, count=each.count * count * placed.layout.passes) for each in made.calls]
    edges, calls = edges_of_tokens(stage.units, placed.profile, placed.layout, rates)
    part.add("tensor", edges)
    part.calls += [replace(each, count=each.count * placed.layout.passes) for each in calls]
    forward, backward = forward + edges.seconds / 2, backward + edges.seconds / 2
    part.forward[number], part.backward[number], part.weight_seconds[number] = forward, backward, weights


def _add_shards(part: _RankPart, number: int, cost: ShardCost, layout: RunLayout) -> None:
    part.add("shard", cost.forward)
    part.add("shard", cost.backward)
    part.forward[number] += cost.forward.seconds
    part.backward[number] += cost.backward.seconds
    part.add_after("shard", cost.reduce, layout.plan.accumulate)
    part.add_after("straggler", cost.wait, layout.plan.accumulate)
    part.calls += cost.calls


def _add_gradients(
    part: _RankPart, number: int, gradients: StageGradients, placed: PlacedModel, rates: Rates
) -> None:
    layout, plan = placed.layout, placed.layout.plan
    backward = _backward(placed, number)
    is_sharded, is_pipeline = plan.zero in (1, 2), layout.degrees.pipeline > 1
    each_pass = plan.zero == 2 and layout.passes > 1
    for buckets, ranks, sharded in (
        (gradients.buckets, layout.replicas, is_sharded),
        (gradients.expert_buckets, layout.expert_replicas, False),
    ):
        group, operation = ExchangeGroup.of(layout, ranks), "reduce_scatter" if sharded else "all_reduce"
        cost = exchange_gradients(
            buckets, group, backward, rates,
            operation=operation, overlaps=each_pass or not is_pipeline, route=plan.route,
        )  # fmt: skip
        part.calls += calls_of(buckets, group, operation, layout.passes if each_pass else 1)
        _add_exchange(part, number, cost, each_pass=each_pass)
    if is_sharded:
        group = ExchangeGroup.of(layout, layout.replicas)
        spent, calls = gather_rows(gradients.chunks, group, layout, rates)
        part.calls += calls
        if plan.overlap_gather and not is_pipeline:
            spent = rates.beside(spent, part.forward[number])
        part.add_after("shard", spent)


def _add_exchange(part: _RankPart, number: int, cost: GradientCost, *, each_pass: bool) -> None:
    slower = Spent(cost.slower_compute)
    found: dict[Term, Spent] = {"data": cost.data, "codec": cost.codec, "compute": slower}
    for term, spent in found.items():
        if each_pass:
            part.add(term, spent)
            part.backward[number] += spent.seconds
        else:
            part.add_after(term, spent)


def _backward(placed: PlacedModel, number: int) -> Backward:
    """Return when backward reaches each place of a stage."""
    begins, each, so_far = [], [], 0.0
    for index, count in reversed(placed.stages[number][0].units):
        begins.append(so_far)
        each.append(placed.passes[index].backward_seconds)
        so_far += count * each[-1]
    return Backward(so_far, begins, each)


def _add_passes(step: CostedStep, part: _RankPart, passes: int) -> None:
    for term, spent in part.terms.items():
        step.add(term, spent, passes)


def _add_pipeline(step: CostedStep, placed: PlacedModel, parts: Sequence[_RankPart], rates: Rates) -> _RankPart:
    """Add the passes of the busiest rank, its bubble, and transfers that nothing hides; return that rank."""
    layout = placed.layout
    times, one_transfer = [], Spent()
    for number, ((stage, _), owner) in enumerate(zip(placed.stages, placed.owners, strict=True)):
        part, send = parts[owner], Spent()
        if number + 1 < len(placed.stages) and placed.owners[number + 1] != owner:
            send, nbytes = transfer(placed.profile.units[stage.units[-1][0]], layout, rates)
            calls = CollectiveCalls("send", "pipeline", layout.degrees.pipeline, nbytes, layout.micro_batches)
            part.calls.append(calls)
            parts[placed.owners[number + 1]].calls.append(calls)
            one_transfer = send if send.seconds > one_transfer.seconds else one_transfer
        weights = part.weight_seconds[number]
        times.append(
            StageTimes(part.forward[number], part.backward[number] - weights, weights, send.seconds)
        )  # fmt: skip
    made = pipeline_step(times, layout)
    busiest = parts[made.busiest]
    _add_passes(step, busiest, layout.micro_batches)
    busy = Spent()
    for spent in busiest.terms.values():
        busy.add(spent, layout.micro_batches)
    step.add("bubble", busy.scaled_to(max(0.0, made.without_transfers - busy.seconds)))
    step.add("transfer", one_transfer.scaled_to(max(0.0, made.seconds - made.without_transfers)))
    return busiest


def _add_after(step: CostedStep, parts: Sequence[_RankPart], layout: RunLayout) -> None:
    """Add what follows the passes, of the rank that it takes longest on."""
    last = max(parts, key=lambda part: part.after_seconds)
    for term, spent in last.after.items():
        step.add(term, spent)


def _add_rest(step: CostedStep, placed: PlacedModel, rates: Rates) -> None:
    layout, profile, cluster = placed.layout, placed.profile, rates.cluster
    step.add("optimizer", _optimizer(placed, rates))
    slowest = min((speed for rank, speed in cluster.rank_speeds.items() if rank < layout.ranks), default=1.0)
    if slowest < 1.0:
        for term in ("compute", "recompute", "optimizer"):
            if step.terms.get(term):
                step.terms["straggler"] = step.terms.get("straggler", 0.0) + step.terms[term] * (1 / slowest - 1.0)
    loader = cluster.loader_bytes_per_second
    if loader is not None:
        nbytes = profile.batch_bytes * layout.samples * layout.passes
        spent = Spent(nbytes / rates.fast(loader), {"loader_bytes_per_second": nbytes})
        step.add("loader", spent.scaled_to(max(0.0, spent.seconds - step.seconds)))


def _optimizer(placed: PlacedModel, rates: Rates) -> Spent:
    """Return the step of the optimizer on the rank that has most: bytes that it moves, and operations to start.

    Shards are as many tensors as what they are of, so that ZeRO and tensor degrees start as many operations.
    """
    layout, profile = placed.layout, placed.profile
    most = tensors = 0.0
    for rank in range(layout.degrees.pipeline):
        mine = [each for (_, each), owner in zip(placed.stages, placed.owners, strict=True) if owner == rank]
        elements = sum(each.elements for each in mine) / layout.shards + sum(each.expert_elements for each in mine)
        most = max(most, elements)
        stages = [stage for (stage, _), owner in zip(placed.stages, placed.owners, strict=True) if owner == rank]
        counts = [count * len(profile.units[index].gradients) for stage in stages for index, count in stage.units]
        tensors = max(tensors, sum(counts))
    moved = profile.optimizer_moved_bytes * layout.gradient_width
    if layout.plan.clip_norm is not None:
        moved += 3 * 4  # read for the norm, read and written to scale
    spent = rates.moved(most * moved)
    at_once = any(each.updates_at_once for each in profile.memory.optimizer.values())
    starts = _DTENSOR_STARTS if layout.plan.zero == MOST_ZERO else 1.0
    spent.add(rates.launched(profile.optimizer_operations * (1.0 if at_once else starts * tensors)))
    disk = (rates.cluster.disk_read_bytes_per_second, rates.cluster.disk_write_bytes_per_second)
    if layout.plan.offload == "disk":
        nbytes = most * profile.optimizer_state_bytes
        for name, speed in zip(("disk_read", "disk_write"), disk, strict=True):
            if speed is not None:
                spent.add(Spent(nbytes / rates.fast(speed), {f"{name}_bytes_per_second": nbytes}))
    return spent


def _merged(calls: Sequence[CollectiveCalls]) -> list[CollectiveCalls]:
    """Return the ledger with equal calls added up."""
    found: dict[tuple[str, str, int, int, str], int] = {}
    for each in calls:
        key = each.operation, each.degree, each.ranks, each.nbytes, each.codec
        found[key] = found.get(key, 0) + each.count
    return [CollectiveCalls(*key[:4], count, key[4]) for key, count in found.items() if count]


def _sent(calls: Sequence[CollectiveCalls]) -> float:
    """Return the bytes that one rank sends by the formulas of a ring."""
    return sum(
        each.count * collective_work(each.operation, each.ranks, each.nbytes).sent_bytes * coded_share(each.codec)
        for each in calls
    )
