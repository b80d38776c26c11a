"""When the buckets of one exchange were ready, on the wire and done: times for the records.

The cost is one reading of the clock a gradient and a few a bucket. Who drives a bucket says what it knows: a job
of the conductor when its turn came, its waits and its rounds; the back end's own work only when it was done.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from ...core.vocabulary.events import BucketFacts, BucketLayout, BucketTimes
from ..transport.comm_thread import BucketWork
from .bucket import Bucket, Waitable
from .coded_bucket import CodedBucket


class BucketTimer:
    """The times of one launched bucket."""

    def __init__(self, launch_seconds: float, work: Waitable) -> None:
        self.launch_seconds = launch_seconds
        self._work = work
        self._done_seconds = 0.0
        if isinstance(work, torch.distributed.Work) and _host_knows_end(work):
            work.get_future().add_done_callback(self._done)

    def _done(self, _: Any) -> None:
        self._done_seconds = time.monotonic()

    def close(self, bucket: Bucket, ready_seconds: Sequence[float], now: float) -> BucketTimes:
        """Return the times of a bucket that has been waited for by `now`. `ready_seconds`: 0.0 is not ready."""
        ready = [at for index in bucket.members if (at := ready_seconds[index])]
        first, last = (min(ready), max(ready)) if ready else (None, None)
        work, launch = self._work, self.launch_seconds
        if isinstance(work, BucketWork):
            begin, end = work.begin_seconds or launch, work.end_seconds or now
            told = (work.wait_seconds, work.codec_seconds, max(1, work.rounds))
        else:
            begin, end, told = launch, self._done_seconds or now, (0.0, 0.0, 1)
        return BucketTimes(bucket.nbytes, bucket.sent_bytes, first, last, launch, begin, end, *told)


def _host_knows_end(work: torch.distributed.Work) -> bool:
    """An accelerator's future is done when its work is queued, which says nothing."""
    return not torch.cuda.is_available()


class LayoutTracker:
    """Notices when the buckets have changed since they were last described."""

    def __init__(self) -> None:
        self._buckets: list[Bucket] = []

    def changed(
        self, buckets: Sequence[Bucket], names: Sequence[str], route: str, engine: int
    ) -> BucketLayout | None:
        """Return what is in the buckets, when it is not what it was."""
        if len(self._buckets) == len(buckets) and all(a is b for a, b in zip(self._buckets, buckets, strict=True)):
            return None
        self._buckets = list(buckets)
        return BucketLayout(route, tuple(_facts(bucket, names) for bucket in buckets), engine)


def _facts(bucket: Bucket, names: Sequence[str]) -> BucketFacts:
    codec = bucket.made.spec.to_text() if isinstance(bucket, CodedBucket) else "none"
    return BucketFacts(bucket.nbytes, codec, tuple(names[index] for index in bucket.members))
