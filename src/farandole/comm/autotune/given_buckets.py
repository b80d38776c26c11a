"""Choose codecs for buckets that are there already: what the autotuner does, where nothing else can be changed.

[Note: one message] All ranks compute the same choice from the same numbers: the largest that some rank measured.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...core.step_model.bucket_plan import BucketPlan
from ...core.step_model.link import LinkModel, ring_factor
from ...core.step_model.prediction import CANDIDATES, CodecSpeed, Gradient, StepProfile, predict_step
from ...core.vocabulary.codec_spec import CodecSpec, low_rank_pays
from ..transport.rank_group import RankGroup
from ..transport.transport import Transport
from .choice import CodecChoice, choose
from .probe import PROBE_TAG, largest_of_all, measure_codecs, probe_bytes, probe_link

_TAG = PROBE_TAG + 48
_WORTH_LOSING = 0.9
"""A step must become shorter than this for a lossy codec: what is chosen once is not corrected later."""
_EACH_ALONE = 1
"""Bytes of a bucket in the step model: what is larger is alone, and so is each of these."""


class GivenBucket(NamedTuple):
    """One bucket of float32 that may have a codec."""

    name: str
    shape: tuple[int, ...]
    ready_seconds: float
    """When it left, after the last exchange was over, on this rank; without waits for others of the exchange."""


class MeasuredChoice(NamedTuple):
    """What was chosen, and by what."""

    choice: CodecChoice
    uncompressed_seconds: float
    """Predicted for a step without codecs."""
    link: LinkModel


def choose_for_buckets(
    transport: Transport,
    across: RankGroup,
    inside: RankGroup | None,
    everyone: RankGroup,
    buckets: Sequence[GivenBucket],
) -> MeasuredChoice:
    """Measure the link and the codecs, and choose a codec for each bucket: the same on all ranks.

    Called by all ranks of `everyone` at once, by the thread that may use `transport`.

    Args:
        transport: what messages travel by.
        across: the ranks that exchange by a codec.
        inside: those of this host, which are summed before that; None: none are.
        everyone: all ranks that take part.
        buckets: of equal names and shapes on all ranks.
    """
    most = sum(_bytes_of(bucket) for bucket in buckets)
    # A short one says how long a good one is: see `Autotuner`.
    short = probe_link(transport, across, everyone, probe_bytes(None, most))
    link = probe_link(transport, across, everyone, probe_bytes(short, most))
    shards, intra_host_seconds, intra_host_round_seconds = 1, 0.0, 0.0
    if inside is not None:
        host = probe_link(transport, inside, everyone, probe_bytes(None, most))
        shards = inside.seat.size
        intra_host_seconds = ring_factor(shards) / host.bytes_per_second
        intra_host_round_seconds = 2 * host.latency_seconds
    names = [
        name
        for name in CANDIDATES
        if not CodecSpec.parse(name).is_low_rank or any(_can_be_low_rank(each, shards) for each in buckets)
    ]
    speeds = measure_codecs(tuple(names), across.seat.size)
    shares_core = len(os.sched_getaffinity(0)) <= torch.get_num_threads()
    costs = [speeds[name].seconds_per_byte for name in names]
    ready = [bucket.ready_seconds for bucket in buckets]
    slowest = largest_of_all(transport, everyone, [float(shares_core), *costs, *ready], _TAG)
    costs, ready = slowest[1 : 1 + len(names)], slowest[1 + len(names) :]
    gradients = [_gradient(bucket, moment, shards) for bucket, moment in zip(buckets, ready, strict=True)]
    profile = StepProfile(
        sorted(gradients, key=lambda gradient: gradient.ready_seconds),
        0.0,  # of all computing only the end matters: it is in `backward_seconds`
        max(ready),
        across.seat.size,
        bool(slowest[0]),
        {
            name: CodecSpeed(cost, speeds[name].ratio, speeds[name].rounds)
            for name, cost in zip(names, costs, strict=True)
        },
        shards,
        intra_host_seconds,
        intra_host_round_seconds,
    )
    best = choose(profile, link, lossy=True, sizes=(_EACH_ALONE,))
    plain = predict_step(profile, link, BucketPlan({}, _EACH_ALONE)).seconds
    if best.seconds > _WORTH_LOSING * plain:
        best = choose(profile, link, lossy=False, sizes=(_EACH_ALONE,))
    return MeasuredChoice(best, plain, link)


def _gradient(bucket: GivenBucket, ready_seconds: float, shards: int) -> Gradient:
    rows, columns = _matrix(bucket)
    return Gradient(
        bucket.name,
        _bytes_of(bucket),
        ready_seconds,
        rows,
        columns,
        can_be_coded=True,
        can_be_low_rank=_can_be_low_rank(bucket, shards),
    )


def _can_be_low_rank(bucket: GivenBucket, shards: int) -> bool:
    rank = CodecSpec.parse(CANDIDATES[-1]).rank
    return shards == 1 and len(bucket.shape) > 1 and low_rank_pays(*_matrix(bucket), rank)


def _matrix(bucket: GivenBucket) -> tuple[int, int]:
    rows = bucket.shape[0] if bucket.shape else 1
    return rows, torch.Size(bucket.shape).numel() // max(1, rows)


def _bytes_of(bucket: GivenBucket) -> int:
    return torch.Size(bucket.shape).numel() * torch.float32.itemsize
