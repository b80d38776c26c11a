"""The exchange of gradients in buckets, behind backward: plain data parallel, and ZeRO stages 1 and 2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from ...core.cluster import CollectiveWork, collective_work
from ...core.link import LinkModel
from ...core.step_model import BucketLoad
from ...core.vocabulary.codec_spec import NONE, CodecSpec
from ..candidate import CollectiveCalls
from ..profile import ModelProfile
from .buckets import BucketKind, BucketTable, LocalGradient, local_gradients
from .layout import RunLayout
from .rates import Link, Rates, Spent
from .stages import StageUnits
from .units import UnitPass, is_block, wait_share

# ZeRO stage 3: units that are gathered before they run and whose gradients are scattered, as torch's FSDP2 does.
#
# Source: Rajbhandari et al. 2020, section 5.3; Zhao et al. 2023, "PyTorch FSDP". Blocks are gathered for forward
# and again for backward, the rest of the model once a pass. While a unit runs, the next one is gathered. On the
# CPU sums are waited for, and on accelerators they travel behind backward.

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


_FLOAT32_BYTES = 4
_SEGMENT_BYTES = 2**21
"""A codec of elements encodes, sends and decodes a bucket in segments of this size."""


class Backward(NamedTuple):
    """The last backward pass before gradients are exchanged."""

    seconds: float
    begins: Sequence[float]
    """When backward reaches each place of the stage."""
    each: Sequence[float]
    """What one unit of a place takes."""

    def ready(self, bucket: BucketKind) -> float:
        """Return when all gradients of a bucket are there."""
        return self.begins[bucket.place] + bucket.progress * self.each[bucket.place]


@dataclass
class GradientCost:
    """What the gradients of a stage cost a step, as far as backward does not hide it."""

    data: Spent = field(default_factory=Spent)
    codec: Spent = field(default_factory=Spent)
    slower_compute: float = 0.0
    """Seconds that computing takes longer because the link is busy, or a codec needs its core."""
    shard: Spent = field(default_factory=Spent)
    calls: list[CollectiveCalls] = field(default_factory=list)
    sent_bytes: float = 0.0


class ExchangeGroup(NamedTuple):
    """Who exchanges gradients."""

    ranks: int
    stride: int
    ranks_in_host: int
    """The size of the group."""

    @classmethod
    def of(cls, layout: RunLayout, ranks: int) -> ExchangeGroup:
        """Return the group of the data-parallel ranks of one model part."""
        stride = layout.stride("data")
        return cls(ranks, stride, min(ranks, max(1, layout.ranks_per_host // stride)))


def exchange_gradients(
    buckets: BucketTable, group: ExchangeGroup, backward: Backward, rates: Rates, *, operation: str,
    overlaps: bool, route: str,
) -> GradientCost:  # fmt: skip
    """Return the cost of one exchange of all buckets: see [Note: replaying a step] in core's step model.

    `overlaps`: whether buckets leave while backward runs; else all are ready at its end.
    """
    cost = GradientCost()
    if group.ranks == 1 or not buckets.kinds:
        return cost
    link = rates.link(operation, group.ranks, group.stride)
    works = [bucket_work(each, group, rates, operation=operation, route=route) for each in buckets.kinds]
    everything, coded = Spent(), Spent()
    for work, count in zip(works, buckets.counts, strict=True):
        everything.add(link.spent(work.sent), count)
        everything.add(work.inside, count)
        coded.add(work.coding, count)
    whole = _exposed(buckets, works, link, backward, rates, overlaps=overlaps)
    exact = whole
    if coded.seconds:
        without = [work._replace(coding=Spent()) for work in works]
        exact = _exposed(buckets, without, link, backward, rates, overlaps=overlaps)
    cost.data, cost.slower_compute = everything.scaled_to(exact.exposed), exact.slower
    if coded.seconds:
        cost.codec = coded.scaled_to(max(0.0, whole.exposed + whole.slower - exact.exposed - exact.slower))
    return cost


class ExchangeWork(NamedTuple):
    """What buckets of one kind ask for, each."""

    sent: CollectiveWork
    inside: Spent
    """Before they leave the host."""
    coding: Spent
    """What a codec takes."""

    @property
    def codec_seconds(self) -> float:
        """The same in seconds."""
        return self.coding.seconds


class _Overlap(NamedTuple):
    exposed: float
    slower: float


def _exposed(
    buckets: BucketTable,
    works: Sequence[ExchangeWork],
    link: Link,
    backward: Backward,
    rates: Rates,
    *,
    overlaps: bool,
) -> _Overlap:
    """Return what backward does not hide, and by how much the exchange makes backward longer."""
    free = sum(
        count * (work.sent.sent_bytes / link.bytes_per_second + work.sent.rounds * link.latency_seconds)
        + count * work.inside.seconds
        for work, count in zip(works, buckets.counts, strict=True)
    )  # fmt: skip
    if not overlaps:
        return _Overlap(
            free + sum(n * work.codec_seconds for work, n in zip(works, buckets.counts, strict=True)), 0.0
        )
    slow, shares_core = rates.compute_slowdown, rates.cluster.codecs_take_compute
    is_serial = not rates.cluster.on_cpus
    busy_link = LinkModel(link.bytes_per_second / rates.exchange_slowdown, link.latency_seconds)
    loads = [
        BucketLoad(
            bucket.gradient_bytes, work.sent.sent_bytes, work.sent.rounds, 0.0,
            intra_host_seconds=work.inside.seconds, cpu_seconds=work.codec_seconds,
            decode_seconds=0.0 if is_serial
            else work.codec_seconds / (2 * max(1.0, bucket.gradient_bytes // _SEGMENT_BYTES)),
            is_serial=is_serial,
        )
        for bucket, work in zip(buckets.kinds, works, strict=True)
    ]  # fmt: skip
    end, cpu = buckets.replay(loads, backward.begins, backward.each, busy_link, slow=slow, shares_core=shares_core)
    busy = sum(
        count * (busy_link.seconds(load.sent_bytes, load.rounds) + load.intra_host_seconds)
        for load, count in zip(loads, buckets.counts, strict=True)
    )
    slower = (cpu if shares_core else 0.0) + (slow - 1.0) * min(backward.seconds, busy)
    behind = max(0.0, end - backward.seconds - slower)
    # Behind backward nothing is slower any more.
    return _Overlap(behind * min(1.0, free / busy if busy else 1.0), slower)


def bucket_work(
    bucket: BucketKind, group: ExchangeGroup, rates: Rates, *, operation: str, route: str
) -> ExchangeWork:
    """Return what a bucket asks for. See docs/fast/slow-networks.md for what codecs send on each route."""
    exact = collective_work(operation, group.ranks, bucket.nbytes)
    if bucket.codec == NONE:
        return ExchangeWork(exact, Spent(), Spent())
    known, is_low_rank = rates.codec(bucket.codec), _is_low_rank(bucket.codec)
    ratio = bucket.sent_ratio
    if known is not None and known.ratio and not is_low_rank:  # else it depends on the shapes of matrices
        ratio = min(ratio, known.ratio)
    rounds = 2 if known is None else known.rounds
    local, hosts = group.ranks_in_host, group.ranks // group.ranks_in_host
    nbytes = float(bucket.gradient_bytes)
    if hosts == 1 and route != "flat" and operation == "reduce_scatter":  # inside one host nothing is packed
        return ExchangeWork(exact, Spent(), Spent())
    if local > 1 and hosts > 1 and route in ("auto", "hierarchical") and not is_low_rank:
        inside = rates.exchange("all_reduce", local, group.stride, nbytes)
        sent = collective_work(operation, hosts, nbytes).sent_bytes * ratio
        return ExchangeWork(CollectiveWork(sent, rounds), inside, _coding(nbytes / local, rates, bucket.codec))
    coding = _coding(nbytes, rates, bucket.codec, bucket.starts)
    if hosts == 1 and route != "flat":
        return ExchangeWork(CollectiveWork(exact.sent_bytes * ratio, rounds), Spent(), coding)
    sent = collective_work(operation, group.ranks, nbytes).sent_bytes * ratio
    # Without memory of the host, a link carries what all of its ranks send. Matrices have no slices.
    work = CollectiveWork(sent * local if hosts > 1 else sent, rounds)
    return ExchangeWork(work, Spent(), coding)


def _coding(nbytes: float, rates: Rates, codec: str, starts: int = 1) -> Spent:
    known = rates.codec(codec)
    if known is None:
        return Spent()
    path, per_bucket = f"codecs.{codec}", known.seconds_per_bucket
    spent = Spent(nbytes * rates.slow(known.seconds_per_byte), {f"{path}.seconds_per_byte": nbytes})
    if per_bucket is not None:
        spent.add(Spent(rates.slow(per_bucket), {f"{path}.seconds_per_bucket": 1.0}), starts)
    return spent


def calls_of(buckets: BucketTable, group: ExchangeGroup, operation: str, count: int) -> list[CollectiveCalls]:
    """Return the ledger of `count` exchanges of all buckets."""
    if group.ranks == 1:
        return []
    degree = "data" if operation == "all_reduce" else "shard"
    return [
        CollectiveCalls(operation, degree, group.ranks, each.nbytes, count * number, each.codec)
        for each, number in zip(buckets.kinds, buckets.counts, strict=True)
    ]


def gather_rows(
    chunks: Mapping[tuple[int, int], int], group: ExchangeGroup, layout: RunLayout, rates: Rates
) -> tuple[Spent, list[CollectiveCalls]]:
    """Return what brings updated parameters to all ranks at stages 1 and 2, and its ledger.

    `chunks`: how many there are, by the bytes of all ranks' rows and of an element.
    """
    spent, calls = Spent(), list[CollectiveCalls]()
    if group.ranks == 1:
        return spent, calls
    codec = layout.plan.weight_codec
    for (nbytes, element), count in chunks.items():
        packs = codec != NONE and element == _FLOAT32_BYTES
        calls.append(
            CollectiveCalls("all_gather", "shard", group.ranks, nbytes, count, codec if packs else NONE)
        )  # fmt: skip
        sent = nbytes * (coded_share(codec) if packs else 1.0)
        spent.add(rates.exchange("all_gather", group.ranks, group.stride, sent), count)
        if packs:
            spent.add(_coding(float(nbytes), rates, codec), count)
    return spent, calls


@lru_cache(maxsize=64)
def _is_low_rank(codec: str) -> bool:
    return CodecSpec.parse(codec).is_low_rank


@lru_cache(maxsize=64)
def coded_share(codec: str) -> float:
    """Return the bytes that travel over those of float32, for a square matrix; 1 where that is not known."""
    if codec == NONE:
        return 1.0
    return (CodecSpec.parse(codec).bytes_per_element(1024, 1024) or 4.0) / 4.0
