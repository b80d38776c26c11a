"""Figures of a cluster as seconds: each amount keeps how often every coefficient is in it.

[Note: features] A `Spent` is linear in the cluster's latencies and in the inverses of its speeds. Its features are
the factors, by the path that the coefficient has in a cluster file: those that end in ``_per_second`` are divided
by the coefficient, all others multiplied with it. ``profile.seconds`` are those that were measured of the model.

[Note: rings across hosts] NCCL gathers and scatters large tensors in rings, whose latency grows with the ranks: of
1,024 each passes on all parts. So presets, whose latencies are those of hops, count a round for each host, and in
each host the rounds inside of it. Measured latencies have what was measured, in rounds of a logarithm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from ...core.cluster import (
    Cluster,
    CodecCost,
    Coefficient,
    CollectiveCost,
    CollectiveWork,
    ComputeRate,
    Tier,
    collective_work,
)
from ...core.vocabulary.codec_spec import NONE
from ...core.vocabulary.errors import PlanError

Case = Literal["value", "best", "worst"]
"""Which end of each coefficient's interval is meant: "best" is the fast one."""
PROFILE_SECONDS = "profile.seconds"
_INSTEAD: Mapping[str, tuple[str, ...]] = {
    "all_reduce": ("reduce_scatter", "all_gather", "send"),
    "all_gather": ("all_reduce", "send"),
    "reduce_scatter": ("all_reduce", "all_gather", "send"),
    "all_to_all": ("all_gather", "all_reduce", "send"),
    "broadcast": ("all_gather", "all_reduce", "send"),
    "send": ("broadcast", "all_gather", "all_reduce"),
}
"""Whose figures stand for an operation that a tier has none of."""
_RINGS = ("all_gather", "reduce_scatter")


class Spent:
    """Seconds, and how often each coefficient of the cluster is in them. See [Note: features]."""

    __slots__ = ("features", "seconds")

    def __init__(self, seconds: float = 0.0, features: dict[str, float] | None = None) -> None:
        self.seconds = seconds
        self.features: dict[str, float] = {} if features is None else features

    def add(self, other: Spent, times: float = 1.0) -> None:
        """Add `times` times what another one is."""
        if times:
            self.seconds += times * other.seconds
            mine = self.features
            for name, count in other.features.items():
                mine[name] = mine.get(name, 0.0) + times * count

    def times(self, factor: float) -> Spent:
        """Return `factor` times as much."""
        return Spent(factor * self.seconds, {name: factor * count for name, count in self.features.items()})

    def scaled_to(self, seconds: float) -> Spent:
        """Return the part of it that takes `seconds`: of an exchange, what nothing hides."""
        if self.seconds <= 0:
            return Spent(seconds)
        return self.times(seconds / self.seconds)


class Link(NamedTuple):
    """A link for one operation of one group."""

    latency_seconds: float
    bytes_per_second: float
    path: str
    share: float
    """The coefficient's bytes per second over this link's: see [Note: links that ranks share] in the cluster."""
    speed_path: str
    """Path of that coefficient."""

    def spent(self, work: CollectiveWork) -> Spent:
        """Return what an exchange takes."""
        return Spent(
            work.rounds * self.latency_seconds + work.sent_bytes / self.bytes_per_second,
            {
                f"{self.path}.latency_seconds": float(work.rounds),
                self.speed_path: work.sent_bytes * self.share,
            },
        )


class PassWork(NamedTuple):
    """What a pass over a unit does."""

    flops: float
    """What matrix products compute, without those of attention in one kernel."""
    moved_bytes: float
    operations: float
    products: float
    """Matrix products among its operations; 0: not known, as many as operations."""
    fused_flops: float = 0.0
    """What attention in one kernel computes."""
    wide_share: float = 0.0
    """What of `flops` is in float32, whatever the precision."""


class Rates:
    """The cluster's figures in one case. Remembers where a figure was a preset, or another operation's."""

    def __init__(self, cluster: Cluster, case: Case = "value") -> None:
        self.cluster, self.case = cluster, case
        self.assumed: set[str] = set()
        """What was not known and taken from elsewhere, as sentences."""
        device = cluster.device
        self._launch = self.slow(device.launch_seconds)
        self._memory = self.fast(device.memory_bytes_per_second)
        self._compute: dict[tuple[str, float], tuple[float, dict[str, float]]] = {}
        self._links: dict[tuple[str, int, int], Link] = {}
        self.compute_slowdown = self.slow(cluster.compute_slowdown)
        self.exchange_slowdown = self.slow(cluster.exchange_slowdown)

    def fast(self, speed: Coefficient) -> float:
        """Return a figure that is better the larger it is."""
        if self.case == "value":
            return speed.value
        return speed.interval()[self.case == "best"]

    def slow(self, cost: Coefficient) -> float:
        """Return a figure that is better the smaller it is."""
        if self.case == "value":
            return cost.value
        return cost.interval()[self.case == "worst"]

    # -- the device --------------------------------------------------------------------------------

    def unit_pass(self, work: PassWork, precision: str) -> Spent:
        """Return a pass over a unit: computing, then moving of memory; and the start of its operations.

        A unit has operations of both kinds, one after the other: matrix products, which compute, and all others,
        which move memory. See docs/plan/internals.md. Rates are those of the unit's mean product. A CPU starts an
        operation and computes it; on accelerators the host starts the next ones meanwhile, and the slower counts.
        """
        size, wide = work.flops / (work.products or work.operations or 1.0), work.wide_share * work.flops
        spent = self.products(work.flops - wide, precision, size)
        spent.add(self.products(wide, "fp32", size))
        spent.add(self.attention(work.fused_flops, precision))
        spent.add(self.moved(work.moved_bytes))
        starts = self.launched(work.operations)
        if not self.cluster.on_cpus:
            return max(spent, starts, key=lambda each: each.seconds)
        spent.add(starts)
        return spent

    def products(self, flops: float, precision: str, size: float) -> Spent:
        """Return matrix products, each of `size`."""
        if not flops:
            return Spent()
        per_flop, weights = self._per_flop(precision, size)
        return Spent(flops * per_flop, {name: flops * weight for name, weight in weights.items()})

    def attention(self, flops: float, precision: str) -> Spent:
        """Return attention in one kernel."""
        if not flops:
            return Spent()
        device = self.cluster.device
        name = device.attention_as(precision)
        if not name:
            if not self.cluster.on_cpus and precision != "fp32":
                self.assumed.add(
                    f"device.attention_flops_per_second has no {precision}: attention is taken to be as fast as "
                    "matrix products, and is slower"
                )
            return self.products(flops, precision, flops)
        rate = self.fast(device.attention_flops_per_second[name])
        return Spent(flops / rate, {f"device.attention_flops_per_second.{name}": flops})

    def moved(self, nbytes: float) -> Spent:
        """Return reading and writing of memory."""
        return Spent(nbytes / self._memory, {"device.memory_bytes_per_second": nbytes})

    def launched(self, operations: float) -> Spent:
        """Return the start of operations."""
        return Spent(operations * self._launch, {"device.launch_seconds": operations})

    def measured(self, seconds: float) -> Spent:
        """Return seconds that were measured of the model itself."""
        return Spent(seconds, {PROFILE_SECONDS: seconds})

    def rates_of(self, precision: str) -> tuple[str, Sequence[ComputeRate]]:
        """Return the rates for a precision, or what stands for them, with the precision that they are of."""
        name = self.cluster.device.compute_as(precision)
        if name:
            if name != precision:
                self.assumed.add(f"device.compute has no rates for {precision}: those of {name} are taken")
            return name, self.cluster.device.compute[name]
        raise PlanError(
            f"cluster: device.compute has no rates for {precision}",
            remedy="measure the cluster with `farandole measure`, or add them to its file",
        )

    def _per_flop(self, precision: str, size: float) -> tuple[float, dict[str, float]]:
        """Return seconds of a floating-point operation, and the weight of each rate's inverse in it.

        Between two sizes inverses are interpolated by the logarithm of the size, so that time is linear in them.
        """
        key = precision, size
        if key not in self._compute:
            name, rates = self.rates_of(precision)
            found: dict[int, float] = {}
            above = next((i for i, rate in enumerate(rates) if rate.flops >= size), len(rates))
            if above == 0 or above == len(rates) or rates[above].flops == size:
                found[min(above, len(rates) - 1)] = 1.0
            else:
                low, high = rates[above - 1].flops, rates[above].flops
                share = math.log(size / low) / math.log(high / low)
                found = {above - 1: 1.0 - share, above: share}
            seconds = sum(weight / self.fast(rates[i].flops_per_second) for i, weight in found.items())
            weights = {f"device.compute.{name}.{i}.flops_per_second": weight for i, weight in found.items()}
            self._compute[key] = seconds, weights
        return self._compute[key]

    # -- links -------------------------------------------------------------------------------------

    def beside(self, exchange: Spent, computing_seconds: float) -> Spent:
        """Return what an exchange adds to a computation beside it: what it makes that slower, and is not hidden.

        After the computation nothing slows the exchange.
        """
        added, slowed = self.slowed(exchange, computing_seconds), exchange.seconds * self.exchange_slowdown
        hidden = (computing_seconds + added.seconds) / slowed if slowed else 1.0
        added.add(exchange, max(0.0, 1.0 - hidden))
        return added

    def slowed(self, exchange: Spent, computing_seconds: float) -> Spent:
        """Return by how much a computation takes longer for an exchange beside it.

        While both run, a second computes what takes 1 / `compute_slowdown` alone.
        """
        both = min(exchange.seconds * self.exchange_slowdown, computing_seconds * self.compute_slowdown)
        return Spent((1.0 - 1.0 / self.compute_slowdown) * both)

    def link(self, operation: str, ranks: int, stride: int) -> Link:
        """Return the figures of an operation among `ranks` that are `stride` apart.

        See [Note: links that ranks share] in `core.cluster`.
        """
        key = operation, ranks, stride
        found = self._links.get(key)
        if found is None:
            tier = self.cluster.tier_of(ranks, stride)
            position = self.cluster.tiers.index(tier)
            cost, name = self._cost(tier.collectives, operation, f"tiers.{position}.collectives")
            speed = alone = self.fast(cost.bytes_per_second)
            inner = self.cluster.tiers[max(0, position - 1)]
            within = min(ranks, inner.ranks // stride)
            if position and within > 1:  # a rank alone on its host has no figures there
                inside, _ = self._cost(inner.collectives, operation, f"tiers.{position - 1}.collectives")
                bound = min(self.fast(inside.bytes_per_second), self._pairs(inner, operation, within))
                speed = max(speed, min(within * speed, bound))
            path = f"tiers.{position}.collectives.{name}"
            speed_path, pairs = f"{path}.bytes_per_second", self._pairs(tier, operation, ranks)
            if pairs < speed and tier.pair_bytes_per_second is not None:
                speed, alone = pairs, self.fast(tier.pair_bytes_per_second)
                speed_path = f"tiers.{position}.pair_bytes_per_second"
            latency = self.slow(cost.latency_seconds)
            found = self._links[key] = Link(latency, speed, path, alone / speed, speed_path)
        return found

    def _pairs(self, tier: Tier, operation: str, ranks: int) -> float:
        """Return what links of pairs give a rank to all others of its group; a message goes over one."""
        if tier.pair_bytes_per_second is None:
            return math.inf
        return (1 if operation == "send" else ranks - 1) * self.fast(tier.pair_bytes_per_second)

    def exchange(self, operation: str, ranks: int, stride: int, nbytes: float) -> Spent:
        """Return one collective, as `collective_work` counts it; see [Note: rings across hosts]."""
        if ranks == 1:
            return Spent()
        work, spent = collective_work(operation, ranks, nbytes), Spent()
        within = self._ring_of(operation, ranks, stride)
        if within:
            hosts = ranks // within
            work = replace(work, rounds=hosts - 1)
            rounds = hosts * collective_work(operation, within, 0.0).rounds
            spent.add(self.load(operation, within, stride, CollectiveWork(0.0, rounds)))
        spent.add(self.load(operation, ranks, stride, work))
        return spent

    def _ring_of(self, operation: str, ranks: int, stride: int) -> int:
        """Return the ranks that a ring across hosts has on each; 0: it is no ring, or its latency was measured."""
        position = self.cluster.tiers.index(self.cluster.tier_of(ranks, stride))
        if not position or operation not in _RINGS or self.cluster.on_cpus:
            return 0
        cost, _ = self._cost(self.cluster.tiers[position].collectives, operation, f"tiers.{position}.collectives")
        within = max(1, self.cluster.tiers[position - 1].ranks // stride)
        return within if cost.latency_seconds.source == "preset" and ranks % within == 0 else 0

    def load(self, operation: str, ranks: int, stride: int, load: CollectiveWork) -> Spent:
        """Return an exchange of so many rounds and bytes, at the figures of `operation`."""
        return self.link(operation, ranks, stride).spent(load)

    def _cost(
        self, collectives: Mapping[str, CollectiveCost], operation: str, path: str
    ) -> tuple[CollectiveCost, str]:
        for name in (operation, *_INSTEAD[operation]):
            if name in collectives:
                if name != operation:
                    self.assumed.add(f"{path} has no {operation}: the figures of {name} are taken")
                return collectives[name], name
        raise PlanError(
            f"cluster: {path} has no collectives",
            remedy="measure the cluster with `farandole measure`, or add them to its file",
        )

    def codec(self, text: str) -> CodecCost | None:
        """Return what a codec costs: by its text, or by its name alone; None: not known."""
        found = self.cluster.codec_cost(text)
        if found is None and text != NONE:
            self.assumed.add(f"codecs has no {text!r}: what it takes is left out")
        return found
