"""What a cluster is to the planner: devices, tiers of links, codecs, input and disk.

[Note: tiers of a cluster] Tiers are ordered from the chattiest: ranks of one host first, then hosts. `ranks` of a
tier is the number of ranks that reach each other through it or a tier before it; the last is the whole cluster. A
group of ranks pays the costs of the outermost tier that it crosses.

[Note: links that ranks share] The figures of an outer tier are those of groups with one rank on each host, while
all such groups exchange: a rank has its part of the host's link. In a group with several ranks on each host, only
one in so many crosses to the next host in a ring, or each sends that part of the bytes after a sum in the host: it
has so many times these bytes per second, up to what the inner tier gives. What a rank sends is below.

[Note: work of a collective] One definition for those who fit `CollectiveCost` to measured exchanges and for those
who predict exchanges by it. Bytes are those that the busiest rank sends with the algorithm that sends least; an
exchange that sends more of them (a backend whose reduce-scatter is an all-reduce inside) is measured as one with
less bandwidth. Rounds grow with the logarithm of the ranks, as those of trees and of recursive doubling do:
Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 2005.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from .link import ring_bytes
from .vocabulary.errors import ConfigError
from .vocabulary.text import did_you_mean

# A figure of a cluster with its source and its interval.

Source = Literal["measured", "preset", "fitted"]


@dataclass(frozen=True, slots=True)
class Coefficient:
    """A figure, where it comes from, and the interval that it is likely in."""

    EXAMPLE: ClassVar[str] = '{ value = 1.25e9, source = "measured", low = 1.2e9, high = 1.3e9 }'
    value: float
    source: Source = field(default="preset", metadata={"is_required": True})
    """"measured" on this cluster, "preset": from a table, never measured here, "fitted" to runs."""
    low: float | None = None
    """Lower end of the interval; None: not known."""
    high: float | None = None

    def interval(self) -> tuple[float, float]:
        """Return both ends; an end that is not known is the value."""
        return (self.value if self.low is None else self.low), (self.value if self.high is None else self.high)


# What a collective makes a rank do: the bytes it sends, and the rounds in which it waits for others.


@dataclass(frozen=True)
class CollectiveWork:
    """What one rank does in a collective."""

    sent_bytes: float
    rounds: int


def collective_work(operation: str, ranks: int, nbytes: float) -> CollectiveWork:
    """Return what a collective among `ranks` ranks makes one of them do. See [Note: work of a collective].

    `nbytes`: of the input of all_reduce, reduce_scatter, all_to_all (of one rank) and broadcast, of the output of
    all_gather, of the message of send. A single rank sends nothing.

    >>> collective_work("all_reduce", 4, 1000)
    CollectiveWork(sent_bytes=1500.0, rounds=4)
    """
    if operation not in OPERATIONS:
        raise ConfigError(f"unknown operation {operation!r}", remedy=did_you_mean(operation, OPERATIONS))
    if ranks == 1:
        return CollectiveWork(0.0, 0)
    if operation == "send":
        return CollectiveWork(float(nbytes), 1)
    rounds = (ranks - 1).bit_length()
    if operation == "broadcast":
        return CollectiveWork(float(nbytes), rounds)
    passes = 2 if operation == "all_reduce" else 1
    return CollectiveWork(ring_bytes(nbytes, ranks, passes), passes * rounds)


CLUSTER_VERSION = 1
_ONE = Coefficient(1.0)
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")


@dataclass(frozen=True)
class ComputeRate:
    """What a device computes, for operations of about this size."""

    flops: float
    """Floating-point operations of one operation (a matrix product); a product of two numbers and a sum are 2."""
    flops_per_second: Coefficient


@dataclass(frozen=True)
class Device:
    """One rank's device, and what a rank may use of it."""

    name: str
    memory_bytes: Coefficient
    """What a rank may use."""
    memory_bytes_per_second: Coefficient
    """Reading and writing of memory."""
    launch_seconds: Coefficient
    """Fixed cost of one operation."""
    compute: Mapping[str, tuple[ComputeRate, ...]]
    """By precision ("fp32", "bf16", "fp16"): rates by size of the operation, ascending; interpolated between."""
    peak_flops_per_second: Mapping[str, float] = field(default_factory=dict)
    """What the hardware promises, by precision. A rate above it is an error. Empty: not known."""
    shares_core: bool = False
    """Whether codecs and sockets take time from the computation: a rank with one core of its own."""
    attention_flops_per_second: Mapping[str, Coefficient] = field(default_factory=dict)
    """By precision, what attention in one kernel computes, forward and backward; causal ones have half of all
    scores. Without a figure: as matrix products."""

    def compute_as(self, precision: str) -> str:
        """Return the precision whose rates of matrix products stand for this one's; empty: none do."""
        return self._first(self.compute, precision, "fp32")

    def attention_as(self, precision: str) -> str:
        """Return the precision whose rate of attention stands for this one's; empty: none does."""
        return self._first(self.attention_flops_per_second, precision)

    def _first(self, known: Mapping[str, object], precision: str, *others: str) -> str:
        alike = {"bf16": "fp16", "fp16": "bf16"}.get(precision, "")
        return next((each for each in (precision, alike, *others) if known.get(each)), "")


@dataclass(frozen=True)
class CollectiveCost:
    """What a collective takes: rounds x latency + bytes that one rank sends / bytes per second."""

    latency_seconds: Coefficient
    """What one round takes."""
    bytes_per_second: Coefficient
    """What one rank sends, while all ranks do. Never above the rate of the link.

    See [Note: links that ranks share].
    """


@dataclass(frozen=True)
class Tier:
    """Ranks that reach each other over one kind of link. See [Note: tiers of a cluster]."""

    name: str
    """Such as "host" or "network"."""
    ranks: int
    collectives: Mapping[str, CollectiveCost] = field(default_factory=dict)
    """By operation of `OPERATIONS`; empty where a rank is alone."""
    line_bytes_per_second: Coefficient | None = None
    """What the link's hardware promises; None: not known."""
    pair_bytes_per_second: Coefficient | None = None
    """What two ranks reach where each pair has a link of its own: n ranks reach n - 1 times as much, up to the
    collective's figure. None: any two reach what all do."""


@dataclass(frozen=True)
class CodecCost:
    """What a codec costs a rank."""

    seconds_per_byte: Coefficient
    """For each byte of float32 in: encoding and decoding."""
    ratio: float
    """Bytes sent over bytes of the exact exchange."""
    rounds: int = 2
    seconds_per_bucket: Coefficient | None = None
    """For a bucket of any size, on an accelerator; None: nothing."""


@dataclass(frozen=True)
class Cluster:
    """Everything that the planner knows of the machines. Immutable; read and written by `cluster_file`."""

    name: str
    device: Device
    tiers: tuple[Tier, ...]
    """From the innermost. The last has all ranks."""
    codecs: Mapping[str, CodecCost] = field(default_factory=dict)
    """By text of the codec, such as "int8"."""
    compute_slowdown: Coefficient = _ONE
    """By how much computation takes longer while the link is busy."""
    exchange_slowdown: Coefficient = _ONE
    """By how much an exchange takes longer while the ranks compute."""
    disk_write_bytes_per_second: Coefficient | None = None
    disk_read_bytes_per_second: Coefficient | None = None
    loader_bytes_per_second: Coefficient | None = None
    """What one loader worker makes of batches."""
    rank_speeds: Mapping[int, float] = field(default_factory=dict)
    """Speed of ranks that are not as fast as the others: {3: 0.66}."""
    price_per_rank_hour: float | None = None
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    """What was measured: hosts, CPU, versions, date."""
    version: int = CLUSTER_VERSION

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.tiers[-1].ranks

    @property
    def on_cpus(self) -> bool:
        """Whether ranks compute on CPUs: their backend says so, else the name of the device."""
        backend = self.fingerprint.get("backend")
        return backend == "gloo" if backend else "cpu" in self.device.name.lower()

    @property
    def operations(self) -> str:
        """Whose operations a rank runs, "cpu" or "cuda", as the analysis of a model takes it."""
        return "cpu" if self.on_cpus else "cuda"

    @property
    def codecs_take_compute(self) -> bool:
        """Whether codecs take their time from the computation: of its core, or of the same accelerator."""
        return self.device.shares_core or not self.on_cpus

    def knows_codec(self, text: str) -> bool:
        """Return whether a codec's cost is known: by its text, or by its name alone; on accelerators measured."""
        found = self.codec_cost(text)
        return found is not None and (self.on_cpus or found.seconds_per_byte.source != "preset")

    def codec_cost(self, text: str) -> CodecCost | None:
        """Return what a codec costs: by its text, or by its name alone; None: not known."""
        return self.codecs.get(text) or self.codecs.get(text.partition(":")[0])

    def tier_of(self, ranks: int, stride: int = 1) -> Tier:
        """Return the innermost tier that holds `ranks` ranks that are `stride` apart. The last if none does."""
        span = (ranks - 1) * stride + 1
        return next((tier for tier in self.tiers if tier.ranks >= span), self.tiers[-1])


# The same machines, more or fewer of them.


def with_ranks(cluster: Cluster, ranks: int) -> Cluster:
    """Return the cluster with `ranks` ranks: fewer, or more hosts like those that are known.

    Figures stay as they are: beyond the ranks that were measured they are extrapolated. Speeds of ranks that are
    not there are left out. Raises `ConfigError` for ranks that do not fill whole hosts, and for more than a host
    where nothing is known of a network.
    """
    if ranks == cluster.ranks:
        return cluster
    if ranks > cluster.ranks and len(cluster.tiers) == 1:
        count = "1 rank" if cluster.ranks == 1 else f"{cluster.ranks} ranks"
        measured = "measure on two hosts (farandole measure -H a:4,b:4), or add [[tiers]] for the network"
        has_network = "network" in cluster.fingerprint
        raise ConfigError(
            f"cluster {cluster.name!r} is one host of {count}, and {ranks} need a network",
            remedy=f"name the preset, which has one: --cluster {cluster.fingerprint['preset']}; or {measured}"
            if has_network
            else measured,
        )
    tiers: list[Tier] = []
    for tier in cluster.tiers:
        if tier is cluster.tiers[-1] or tier.ranks >= ranks:
            tiers.append(replace(tier, ranks=ranks))
            break
        check_hosts(ranks, tier.ranks, f"cluster {cluster.name!r}")
        tiers.append(tier)
    speeds = {rank: speed for rank, speed in cluster.rank_speeds.items() if rank < ranks}
    return replace(cluster, tiers=tuple(tiers), rank_speeds=speeds)


def check_hosts(ranks: int, per_host: int, what: str) -> None:
    """Raise `ConfigError` for ranks that are not a part of a host, or whole hosts."""
    if ranks < 1:
        raise ConfigError(f"{ranks} ranks: expected at least 1")
    if ranks > per_host and ranks % per_host:
        less = ranks - ranks % per_host
        raise ConfigError(
            f"{what}: {ranks} ranks do not fill hosts of {per_host}",
            remedy=f"take {less} or {less + per_host} ranks",
        )


# Two clusters, figure by figure: what differs by more than its interval.


_SAME = 1e-9


@dataclass(frozen=True)
class FigureChange:
    """One figure in both clusters. None: that cluster does not have it."""

    path: str
    """As in the file, such as "tiers.network.collectives.all_reduce.bytes_per_second"."""
    before: Coefficient | None
    after: Coefficient | None

    @property
    def ratio(self) -> float | None:
        """After over before; None where one is missing, or before is 0 and after is not."""
        if self.before is None or self.after is None:
            return None
        if self.before.value == self.after.value:
            return 1.0
        return None if self.before.value == 0 else self.after.value / self.before.value

    @property
    def is_disjoint(self) -> bool | None:
        """Whether the intervals do not overlap: the change is more than noise. None: an interval is not known."""
        if self.before is None or self.after is None:
            return None
        if None in (self.before.low, self.before.high, self.after.low, self.after.high):
            return None
        (low, high), (other_low, other_high) = self.before.interval(), self.after.interval()
        return high < other_low or other_high < low

    def to_mapping(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "path": self.path,
            "before": None if self.before is None else dataclasses.asdict(self.before),
            "after": None if self.after is None else dataclasses.asdict(self.after),
            "ratio": self.ratio,
            "is_disjoint": self.is_disjoint,
        }


def compare_clusters(before: Cluster, after: Cluster) -> list[FigureChange]:
    """Return every figure of either cluster, in the order of the file; those that are equal too.

    Tiers are matched by name, and rates of computation by precision and size.
    """
    one, other = dict(figures_of(before)), dict(figures_of(after))
    return [FigureChange(path, one.get(path), other.get(path)) for path in {**one, **other}]


def figures_of(cluster: Cluster) -> Iterator[tuple[str, Coefficient]]:
    """Return every figure with its path; numbers without a source, such as ratios, as figures without interval."""
    yield from _figures(cluster, "")


def is_changed(change: FigureChange) -> bool:
    """Return whether the two values differ at all, or one is missing."""
    ratio = change.ratio
    return ratio is None or not math.isclose(ratio, 1.0, rel_tol=_SAME)


def _figures(value: Any, path: str) -> Iterator[tuple[str, Coefficient]]:
    if isinstance(value, Coefficient):
        yield path, value
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        if not path.endswith("version"):
            yield path, Coefficient(float(value))
    elif isinstance(value, ComputeRate):
        yield f"{path}.flops_per_second", value.flops_per_second
    elif dataclasses.is_dataclass(value):
        for each in dataclasses.fields(value):
            yield from _figures(getattr(value, each.name), f"{path}.{each.name}" if path else each.name)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _figures(each, f"{path}.{key}")
    elif isinstance(value, tuple):
        for number, each in enumerate(value):
            yield from _figures(each, f"{path}.{_row(each, number)}")


def _row(value: Any, number: int) -> str:
    if isinstance(value, Tier):
        return value.name
    return f"{value.flops:.3g}" if isinstance(value, ComputeRate) else str(number)
