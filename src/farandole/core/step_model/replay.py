"""The recurrence of a step: buckets leave one after another, each when it is ready and the link is free.

[Note: replaying a step] Bucket i, in launch order, with the previous bucket's end e(i - 1):

    prepared(i) = max(prepared(i - 1), ready(i)) + prepare(i)
    begin(i)    = max(prepared(i), e(i - 1)) + intra_host(i)
    e(i)        = begin(i) + max(sent(i) / bandwidth + rounds(i) x latency, cpu(i))

The step's communication ends at e(last) + decode(last); what of it lies behind the end of computing is exposed.
Where the thread that communicates shares the core that computes, ready(i) is later by the CPU time of the buckets
before it. The overlap of buckets with backward: Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .link import LinkModel


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
