"""Predicts the time of a step from a profile, a link and a bucket plan.

[Note: the model of a step] Forward, then backward, which hands over gradients at the measured moments. Buckets
leave as `replay_buckets` lets them. Where ranks sum inside a host (or behind a switch) first, this takes its own
measured time, and each rank then sends its shard of the bucket. Codec and TCP need CPU time: on a rank with one
core this is taken from backward, else only from the link's thread. The step ends when backward has ended and the
last bucket has arrived and was decoded.

[Note: replaying a step] Bucket i, in launch order, with the previous bucket's end e(i - 1):

    prepared(i) = max(prepared(i - 1), ready(i)) + prepare(i)
    begin(i)    = max(prepared(i), e(i - 1)) + intra_host(i)
    e(i)        = begin(i) + max(sent(i) / bandwidth + rounds(i) x latency, cpu(i))

The step's communication ends at e(last) + decode(last); what of it lies behind the end of computing is exposed.
Where the thread that communicates shares the core that computes, ready(i) is later by the CPU time of the buckets
before it. The overlap of buckets with backward: Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3.

[Note: a step at another batch] Forward, loss and backward passes, and waits for data and for other ranks, are
taken to grow in proportion to the samples; the optimizer and what is in no phase, not at all. Gradients become
ready earlier or later in the same proportion, and the buckets are replayed behind them. Where passes
have fixed costs, the time of smaller batches is too low, and of larger ones too high. Exposed time that the replay
does not explain is assumed to stay.

[Note: the next sample] Samples are given out one by one, each to the rank that would finish with it first. For
times that grow with the samples this is the shortest possible step; rounding of exact shares is not, by up to 1.4
times with small batches.

>>> divide_samples(8, (1.0, 1.0, 1.0, 0.5))
(3, 2, 2, 1)
>>> longest_seconds((3, 2, 2, 1), (1.0, 1.0, 1.0, 0.5))
3.0
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import NamedTuple

from .bucket_plan import BucketPlan, plan_buckets
from .link import LinkModel, ring_factor
from .vocabulary.codec_spec import NONE, CodecSpec
from .vocabulary.spec import DEVICE_BUCKET_BYTES

# Medians and their bootstrap intervals, of times and of ratios that are paired in time.

_DRAWS = 2000
_NESTED_DRAWS = 500
_MOST_VALUES = 400
Interval = tuple[float, float]


def median_interval(values: Sequence[float]) -> tuple[float, Interval]:
    """Return the median and its 95 % bootstrap interval, the same on every call. Needs at least one value."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(_DRAWS))
    return statistics.median(values), (medians[int(_DRAWS * 0.025)], medians[int(_DRAWS * 0.975) - 1])


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, Interval]:
    """Return the median of ours / theirs, pair by pair, and its interval.

    Neighbours in time share the machine's mood, so their ratio is steadier than the ratio of medians.
    """
    return median_interval([a / b for a, b in zip(ours, theirs, strict=True)])


def nested_interval(groups: Sequence[Sequence[float]]) -> tuple[float, Interval]:
    """Return the middle of the groups' medians and its 95 % bootstrap interval, of positive values.

    Groups are rounds. They are drawn first, then values inside each: values of one round share the machine's mood,
    and count for less than as many independent ones. Needs at least one group, and a value in each.
    """
    ones = [[1.0] for _ in groups]
    return nested_ratio(groups, ones)


def nested_ratio(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> tuple[float, Interval]:
    """Return the middle over the rounds of median(ours) / median(theirs), and its interval as above.

    Both have the same rounds, whose members were measured side by side. The middle of an even number of rounds is
    the geometric mean of the two in it: then a rate is what was done divided by the time it took, and a speedup by
    rates that by times, however far two rounds are apart.
    """
    draw = random.Random(0)
    rounds = [(_thinned(a), _thinned(b)) for a, b in zip(ours, theirs, strict=True)]
    ratios = sorted(
        _middle([_drawn(draw, a) / _drawn(draw, b) for a, b in draw.choices(rounds, k=len(rounds))])
        for _ in range(_NESTED_DRAWS)
    )
    middle = _middle([statistics.median(a) / statistics.median(b) for a, b in rounds])
    return middle, (ratios[int(_NESTED_DRAWS * 0.025)], ratios[int(_NESTED_DRAWS * 0.975) - 1])


def _middle(values: Sequence[float]) -> float:
    return math.sqrt(statistics.median_low(values) * statistics.median_high(values))


def _drawn(draw: random.Random, values: Sequence[float]) -> float:
    return statistics.median(draw.choices(values, k=len(values)))


def _thinned(values: Sequence[float]) -> Sequence[float]:
    """Return evenly spaced values of very long rounds: the interval is no worse, and does not take minutes."""
    return values[:: -(-len(values) // _MOST_VALUES)]


# The recurrence of a step: buckets leave one after another, each when it is ready and the link is free.


class BucketLoad(NamedTuple):
    """What one bucket of a step needs. Times of one clock, whose zero the caller chooses."""

    nbytes: float
    """Bytes of its gradients, uncompressed."""
    sent_bytes: float
    """By one rank."""
    rounds: float
    ready_seconds: float
    """When its last gradient is ready, on the last rank."""
    first_ready_seconds: float = 0.0
    """When its first gradient is; only `rebucket` asks."""
    prepare_seconds: float = 0.0
    """Work before it may leave, while other buckets are on their way: a codec that takes a whole bucket."""
    intra_host_seconds: float = 0.0
    """Exchange inside the host, while nothing else is on its way."""
    cpu_seconds: float = 0.0
    """CPU time while it is on its way: a codec that takes segments, and the socket calls."""
    decode_seconds: float = 0.0
    """Work after it has arrived, before its gradients can be used."""
    is_serial: bool = False
    """Whether `cpu_seconds` are not beside its messages, but before and behind: a stream of a device does both."""

    def on_link(self, link: LinkModel) -> float:
        """Return how long it is on its way, after the exchange inside the host."""
        sent = link.seconds(self.sent_bytes, self.rounds)
        return sent + self.cpu_seconds if self.is_serial else max(sent, self.cpu_seconds)

    def coded(self, ratio: float, codec_seconds_per_byte: float = 0.0) -> BucketLoad:
        """Return the bucket with `ratio` times the bytes sent, encoded whole before it leaves."""
        return self._replace(
            sent_bytes=ratio * self.sent_bytes, prepare_seconds=codec_seconds_per_byte * self.nbytes
        )


class Replay(NamedTuple):
    """How the buckets of a step went."""

    end_seconds: float
    """When the last one had arrived and was decoded; minus infinity without a bucket."""
    cpu_seconds: float
    """CPU time of all of them."""


def replay_buckets(buckets: Iterable[BucketLoad], link: LinkModel, *, shares_core: bool = False) -> Replay:
    """Return when the last bucket arrives. See [Note: replaying a step]."""
    prepared = end = -float("inf")
    cpu = decode = 0.0
    for bucket in buckets:
        ready = bucket.ready_seconds + (cpu if shares_core else 0.0)
        prepared = max(prepared, ready) + bucket.prepare_seconds
        begin = max(prepared, end) + bucket.intra_host_seconds
        end = begin + bucket.on_link(link)
        cpu += bucket.cpu_seconds + bucket.intra_host_seconds
        decode = bucket.decode_seconds
    return Replay(end + decode, cpu)


def rebucket(buckets: Sequence[BucketLoad], bucket_bytes: float) -> list[BucketLoad]:
    """Return the buckets that another size would give, where only buckets are known, not their gradients.

    All have the same size, the usual number of rounds and the present ratio of sent bytes to bytes. The gradients
    of a bucket are assumed to become ready at an even rate.
    """
    total = sum(bucket.nbytes for bucket in buckets)
    if total <= 0:
        return list(buckets)
    rounds = statistics.median([bucket.rounds for bucket in buckets])
    count = max(1, round(total / bucket_bytes))
    ratio = sum(bucket.sent_bytes for bucket in buckets) / total
    result = []
    for number in range(count):
        begin, end = total * number / count, total * (number + 1) / count
        first, last = _ready_at(buckets, begin), _ready_at(buckets, end)
        result.append(BucketLoad(end - begin, ratio * (end - begin), rounds, last, first))
    return result


def _ready_at(buckets: Sequence[BucketLoad], nbytes: float) -> float:
    """Return when so many bytes of gradients were ready."""
    so_far = 0.0
    for bucket in buckets:
        if bucket.nbytes > 0 and so_far + bucket.nbytes >= nbytes - 0.5:
            part = min(1.0, (nbytes - so_far) / bucket.nbytes)
            return bucket.first_ready_seconds + part * (bucket.ready_seconds - bucket.first_ready_seconds)
        so_far += bucket.nbytes
    return buckets[-1].ready_seconds


# A typical step of a run at another batch: what was measured, with the part that grows with the samples scaled.


@dataclass(frozen=True)
class MeasuredStep:
    """A typical step of a run."""

    ranks: int
    global_batch: int
    """Samples of all ranks."""
    growing_seconds: float
    fixed_seconds: float
    exposed_seconds: float
    """Communication behind which no computation ran, in all exchanges of the step."""
    exchanges: int
    buckets: tuple[BucketLoad, ...]
    """Those of one exchange. Zero is the end of computing."""
    link: LinkModel
    codec: str
    """That it was measured with."""
    ratios: Mapping[str, float]
    """By codec: bytes over those that were sent. `codec` is 1."""
    codec_seconds_per_byte: Mapping[str, float]
    """By codec, where that was measured: CPU time for a byte of float32."""
    critical_batch: float | None = None
    """As `fd.noise_scale` has measured it, in samples."""
    notes: tuple[str, ...] = ()

    def at(self, global_batch: float, codec: str) -> tuple[float, float]:
        """Return the seconds of a step and how many of them are exposed. See [Note: a step at another batch].

        >>> load = BucketLoad(4e6, 4e6, 2, ready_seconds=-0.01)
        >>> link = LinkModel(bytes_per_second=1e8, latency_seconds=0.0)
        >>> step = MeasuredStep(2, 32, 0.1, 0.02, 0.03, 1, (load,), link, "none", {"none": 1.0}, {})
        >>> [round(seconds, 3) for batch in (32, 64, 256) for seconds in step.at(batch, "none")]
        [0.15, 0.03, 0.24, 0.02, 0.82, 0.0]
        """
        factor = global_batch / self.global_batch
        exposed = self._exposed(factor, codec)
        return self.fixed_seconds + factor * self.growing_seconds + exposed, exposed

    def _exposed(self, factor: float, codec: str) -> float:
        base = self._replayed(1.0, self.codec)
        once = self.exposed_seconds / self.exchanges
        trust = min(1.0, once / base) if base > 0 else 1.0
        return self.exchanges * max(0.0, once - trust * (base - self._replayed(factor, codec)))

    def _replayed(self, factor: float, codec: str) -> float:
        ratio = self.ratios[codec]
        cost = self.codec_seconds_per_byte.get(codec, 0.0) if codec != self.codec else 0.0
        loads = [
            each.coded(ratio, cost)._replace(
                ready_seconds=factor * each.ready_seconds, first_ready_seconds=factor * each.first_ready_seconds
            )
            for each in self.buckets
        ]
        return max(0.0, replay_buckets(loads, self.link).end_seconds)


# How many samples of a batch each rank gets, by how fast it is. Pure arithmetic.


@lru_cache(maxsize=1024)
def divide_samples(count: int, speeds: tuple[float, ...], cap: int = 0) -> tuple[int, ...]:
    """Return the samples of each rank, which add up to `count`. See [Note: the next sample].

    Each rank has at least one, if there are enough; ranks that would finish at the same time are served in order.

    Args:
        count: samples of the batch, from 0.
        speeds: samples a second of each rank, above 0.
        cap: the most that a rank gets; 0: no limit. There must be room for `count`.
    """
    size = len(speeds)
    if cap and count > cap * size:
        raise ValueError(f"{count} samples do not fit {size} ranks of at most {cap}")
    least = 1 if count >= size else 0
    # What everyone has done before the remainder is given out, less one sample each: so far no order matters.
    begin_seconds = max(count - size, 0) / sum(speeds)
    counts = [max(least, int(speed * begin_seconds)) for speed in speeds]
    counts = [min(cap, each) for each in counts] if cap else counts
    heap = [
        ((own + 1) / speed, rank)
        for rank, (own, speed) in enumerate(zip(counts, speeds, strict=True))
        if not cap or own < cap
    ]
    heapq.heapify(heap)
    for _ in range(count - sum(counts)):
        rank = heap[0][1]
        counts[rank] += 1
        if cap and counts[rank] >= cap:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, ((counts[rank] + 1) / speeds[rank], rank))
    return tuple(counts)


def longest_seconds(counts: Sequence[int], speeds: Sequence[float]) -> float:
    """Return how long the rank takes that finishes last. `speeds`: samples a second."""
    return max(own / speed for own, speed in zip(counts, speeds, strict=True))


_EFFICIENCY = 0.85
"""What a link gives while the ranks compute, beside what it gives a probe: an allowance, not a measurement."""
_SEGMENT_BYTES = 2**21
"""A codec of elements encodes, sends and decodes a bucket in segments of this size."""
CANDIDATES = (NONE, "bf16", "int8", "int4", "powersgd:rank=4")
"""Codecs whose time is predicted, from the smallest loss to the largest."""


@dataclass(frozen=True)
class Gradient:
    """One parameter's gradient: its size, and when backward hands it over."""

    name: str
    nbytes: int
    ready_seconds: float
    """After the beginning of backward."""
    rows: int
    columns: int
    can_be_coded: bool
    can_be_low_rank: bool
    dtype: str = "float32"
    """Gradients of different types do not share a bucket."""


@dataclass(frozen=True)
class CodecSpeed:
    """What a codec costs a rank."""

    seconds_per_byte: float
    """For each byte of float32 in, encoding and decoding: of a core, or of an accelerator."""
    ratio: float
    """Bytes sent over bytes of the exact exchange; not used for low-rank codecs."""
    rounds: int = 2
    seconds_per_bucket: float = 0.0
    """For a bucket of any size: on an accelerator its operations are started one by one."""

    def seconds(self, nbytes: float, starts: int = 1) -> float:
        """Return what a bucket of so many bytes of float32 takes; a codec of matrices `starts` with each."""
        return nbytes * self.seconds_per_byte + starts * self.seconds_per_bucket


def slowest_speed(speed: CodecSpeed, costs: Sequence[Sequence[float]]) -> CodecSpeed:
    """Return what a codec costs the rank to which a bucket of `DEVICE_BUCKET_BYTES` costs most.

    `costs`: of each rank, seconds per byte and per bucket. `speed`: of any.
    """
    ranks = [replace(speed, seconds_per_byte=a, seconds_per_bucket=b) for a, b in costs]
    return max(ranks, key=lambda each: each.seconds(DEVICE_BUCKET_BYTES))


@dataclass(frozen=True)
class StepProfile:
    """A step without its exchange, and what codecs cost. The same on all ranks: the slowest rank's times."""

    gradients: Sequence[Gradient]
    """In the order in which they are ready."""
    forward_seconds: float
    backward_seconds: float
    ranks: int
    """That exchange with each other."""
    shares_core: bool
    """Whether the codecs' thread runs on the core that computes."""
    speeds: Mapping[str, CodecSpeed]
    """By text of the codec."""
    shards: int = 1
    """Ranks of a host that sum a bucket among themselves before each exchanges its shard with other hosts."""
    intra_host_seconds_per_byte: float = 0.0
    """For each byte of a whole bucket: reduce-scatter and all-gather inside the host."""
    intra_host_round_seconds: float = 0.0
    """The same for a very small bucket."""
    is_serial: bool = False
    """See `BucketLoad`."""


@dataclass(frozen=True)
class StepPrediction:
    """What a step takes, in seconds, and what one rank sends in it."""

    seconds: float
    compute_seconds: float
    """Forward and backward, with the CPU time that communication takes from them."""
    sent_bytes: float


def predict_step(profile: StepProfile, link: LinkModel, plan: BucketPlan) -> StepPrediction:
    """Return what a step takes. See [Note: the model of a step].

    Args:
        profile: the step without its exchange. `speeds` has every codec of the plan.
        link: what a probe of the link gave, while the ranks did not compute.
        plan: codecs by parameter and the sizes of buckets.
    """
    loads = loads_of(profile, link, plan)
    busy_link = replace(link, bytes_per_second=_EFFICIENCY * link.bytes_per_second)
    end, cpu = replay_buckets(loads, busy_link, shares_core=profile.shares_core)
    backward = profile.backward_seconds + (cpu if profile.shares_core else 0.0)
    seconds = profile.forward_seconds + max(backward, end)
    return StepPrediction(seconds, profile.forward_seconds + backward, sum(load.sent_bytes for load in loads))


def buckets_of(profile: StepProfile, plan: BucketPlan) -> list[list[Gradient]]:
    """Return the gradients by bucket, as the reducer will divide them."""
    return plan_buckets(
        profile.gradients,
        key=lambda gradient: (gradient.dtype, plan.codec_of(gradient.name)),
        first_bytes=plan.first_bucket_bytes or plan.bucket_bytes,
        limit_bytes=plan.bucket_bytes,
    )


def loads_of(profile: StepProfile, link: LinkModel, plan: BucketPlan) -> list[BucketLoad]:
    """Return what each bucket of `plan` is to the link and to the ranks' cores, in launch order."""
    return [_load(profile, link, plan, bucket) for bucket in buckets_of(profile, plan)]


def _load(profile: StepProfile, link: LinkModel, plan: BucketPlan, bucket: Sequence[Gradient]) -> BucketLoad:
    codec = plan.codec_of(bucket[0].name)
    speed = profile.speeds[codec]
    whole = sum(gradient.nbytes for gradient in bucket)
    nbytes = whole / profile.shards
    sent = sum(sent_bytes(gradient, codec, speed, profile.ranks) for gradient in bucket) / profile.shards
    starts = len(bucket) if _spec(codec).is_low_rank else 1
    cpu = speed.seconds(nbytes, starts) + 2 * sent * link.cpu_seconds_per_byte
    return BucketLoad(
        nbytes,
        sent,
        speed.rounds,
        bucket[-1].ready_seconds,
        bucket[0].ready_seconds,
        intra_host_seconds=whole * profile.intra_host_seconds_per_byte + profile.intra_host_round_seconds,
        cpu_seconds=cpu,
        # The last segment is decoded when all others are.
        decode_seconds=0.0 if profile.is_serial else cpu / (2 * max(1.0, nbytes // _SEGMENT_BYTES)),
        is_serial=profile.is_serial,
    )


@cache
def _spec(codec: str) -> CodecSpec:
    return CodecSpec.parse(codec)


def sent_bytes(gradient: Gradient, codec: str, speed: CodecSpeed, ranks: int) -> float:
    """Return what a rank sends for one gradient: by the codec's formula where that depends on the shape."""
    spec = _spec(codec)
    ratio = speed.ratio
    if spec.is_low_rank:
        ratio = (spec.bytes_per_element(gradient.rows, gradient.columns) or 4.0) / 4.0
    return ring_factor(ranks) * gradient.nbytes * ratio


# What a step takes where ranks train on their own and meet every H steps, by the profile of others.
#
# [Note: how often ranks meet] A step lasts C + m / H for C seconds of computing and m of a meeting. H is the
# smallest with which meetings take a twentieth of the computing; at least 10, and at most 100, as ranks drift
# apart.


_MEETING_SHARE = 0.05
LEAST_STEPS, MOST_STEPS = 10, 100


@dataclass(frozen=True)
class LocalPrediction:
    """What steps take whose ranks meet after `steps` of them."""

    steps: int
    seconds: float
    """A step, with its part of a meeting."""
    meeting_seconds: float


def predict_local_steps(
    profile: StepProfile, link: LinkModel, codec: str, *, other_seconds: float = 0.0
) -> LocalPrediction:
    """Return how often ranks would meet, and what a step takes then. See [Note: how often ranks meet].

    Args:
        profile: a step without its exchange; `speeds` has `codec` and "none".
        link: what a probe gave, while the ranks did not compute: as it is in a meeting.
        codec: of the changes that can have one.
        other_seconds: what a step takes beside forward, backward and the exchange: data, the optimizer.
    """
    codecs = {each.name: codec for each in profile.gradients if each.can_be_coded}
    whole = sum(each.nbytes for each in profile.gradients)
    loads = loads_of(profile, link, BucketPlan(codecs, whole, whole))
    meeting = sum(
        load.sent_bytes / link.bytes_per_second + load.rounds * link.latency_seconds + load.cpu_seconds
        for load in loads
    )
    compute = profile.forward_seconds + profile.backward_seconds + other_seconds
    steps = math.ceil(meeting / (_MEETING_SHARE * compute)) if compute else MOST_STEPS
    steps = min(MOST_STEPS, max(LEAST_STEPS, steps))
    return LocalPrediction(steps, compute + meeting / steps, meeting)
