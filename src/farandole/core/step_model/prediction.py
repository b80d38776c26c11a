"""Predicts the time of a step from a profile, a link and a bucket plan.

[Note: the model of a step] Forward, then backward, which hands over gradients at the measured moments. Buckets
leave by `replay`'s recurrence. Where ranks sum inside a host (or behind a switch) first, this takes its own
measured time, and each rank then sends its shard of the bucket. Codec and TCP need CPU time: on a rank with one
core this is taken from backward, else only from the link's thread. The step ends when backward has ended and the
last bucket has arrived and was decoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from ..vocabulary.codec_spec import NONE, CodecSpec
from ..vocabulary.spec import DEVICE_BUCKET_BYTES
from .bucket_plan import BucketPlan, plan_buckets
from .comm_cost import ring_factor
from .link import LinkModel
from .replay import BucketLoad, replay_buckets

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
