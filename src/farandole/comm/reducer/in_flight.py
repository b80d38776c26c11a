"""The buckets of one exchange that are launched and not waited for, and the times of each for the records.

The times cost one reading of the clock a gradient and a few a bucket. Work of the communication thread knows when
its turn came, its waits and its rounds; work of the backend only when it was done.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...core.vocabulary.errors import Mismatch
from ...core.vocabulary.events import BucketFacts, BucketLayout, BucketTimes
from ...core.vocabulary.rank_lists import name_ranks
from ..buckets.bucket import Bucket, Waitable
from ..buckets.bucket_set import BucketSet
from ..buckets.coded_bucket import CodedBucket
from ..buckets.sparse_bucket import SparseBucket
from ..collectives.backend import start_all_reduce
from ..transport.comm_thread import BucketWork
from ..world.comm_errors import refuse_if_ended, translate_error, translated
from ..world.store_sync import all_gather_json
from ..world.world import World
from .open_route import OpenRoute
from .options import ExtraTensors


class InFlightBuckets:
    """A reducer's buckets that have been launched and not been waited for, exchange by exchange."""

    def __init__(self, world: World, buckets: BucketSet, open_route: OpenRoute) -> None:
        self._world, self._set, self._open_route = world, buckets, open_route
        # - Of the current exchange
        self.is_exchanging = False
        """Whether buckets are launched as soon as they are complete."""
        self.launched = 0
        """How many buckets are launched, from the first on."""
        self._works: list[Waitable] = []
        self._timers: list[BucketTimer] = []
        self._steps: int | None = None
        self._marked: Bucket | None = None
        """The bucket that says how many steps were made."""
        # - What travels along
        self._extra: list[ExtraTensors] = []
        self._extra_works: list[tuple[ExtraTensors, dist.Work]] = []
        # - For the records
        self._described: list[Bucket] = []

    def add_extra_tensors(self, extra: ExtraTensors) -> None:
        """Take `extra` along from the first exchange on."""
        self._extra.append(extra)

    def prepare_extra_tensors(self) -> None:
        """Agree with all ranks on what travels along; once, in the first pass."""
        self._extra = [extra for extra in self._extra if extra.prepare()]

    def begin(self, steps: int | None) -> None:
        """Begin an exchange: nothing is launched. `steps`: of this rank's optimizers; see [Note: one step off]."""
        self.is_exchanging = True
        self.launched, self._steps, self._marked = 0, steps, None
        self._works, self._timers, self._extra_works = [], [], []
        for bucket in self._set.buckets:
            bucket.pending = len(bucket.members)
        if self._set.frozen:
            self._set.expect_unfrozen()

    def ignore_steps(self) -> None:
        """Agree with the other ranks' numbers of steps in this exchange, whatever they are."""
        self._steps = None

    def drop(self) -> None:
        """Drop all pending work."""
        self._works, self._extra_works = [], []

    # -- launching -----------------------------------------------------------------------------

    def launch_extra_tensors(self, factor: float) -> None:
        """Launch what travels along, weighted by this rank's `factor`; before the first bucket."""
        for extra in self._extra:
            tensor = extra.pack(factor / self._world.size)
            with translated(self._world, "all-reduce of buffers"):
                work = start_all_reduce(tensor, self._open_route.require().group)
            self._extra_works.append((extra, work))

    def launch_complete(self, weight: float) -> None:
        """Launch, in the agreed order, every bucket up to the first that is not complete."""
        buckets = self._set.buckets
        while self.launched < len(buckets) and buckets[self.launched].pending <= 0:
            self._launch_next(weight)

    def launch_rest(self, weight: float) -> None:
        """Launch all buckets that are not launched, complete or not."""
        while self.launched < len(self._set.buckets):
            self._launch_next(weight)

    def _launch_next(self, weight: float) -> None:
        bucket = self._set.buckets[self.launched]
        try:
            bucket.load(weight)
        except RuntimeError as problem:
            raise self._set.explain_load(bucket, problem) from None
        if self._marked is None and not isinstance(bucket, SparseBucket):
            self._marked = bucket
            bucket.mark_steps(self._steps)
        if self._set.carry_over.is_active:
            self._set.carry_over.add_to(bucket)
        if self._world.groups.sockets.shut_down or self._world.in_forked_child:
            refuse_if_ended(self._world, "all-reduce", bucket=self.launched)
        launch = time.monotonic()
        try:
            work = bucket.launch(self._open_route.route or self._open_route.require())
        except RuntimeError as problem:
            raise translate_error(problem, self._world, "all-reduce", bucket=self.launched) from None
        self._works.append(work)
        self._timers.append(BucketTimer(launch, work))
        self.launched += 1

    # -- waiting -------------------------------------------------------------------------------

    def wait(self, steps_begun: int, exchanges_done: int) -> None:
        """Wait for everything, and put it where it belongs. The arguments are for the error's text.

        Raises `Mismatch`, on all ranks, and leaves the sums where they are, when these are of different steps.
        """
        for position, work in enumerate(self._works):
            try:
                work.wait()
            except RuntimeError as problem:
                raise translate_error(problem, self._world, "all-reduce", bucket=position) from None
        for extra, work in self._extra_works:
            with translated(self._world, "all-reduce of buffers"):
                work.wait()
            extra.unpack()
        if self._marked is not None and self._marked.steps_differ:
            _refuse_difference_of_steps(self._world, steps_begun, exchanges_done)
        for bucket in self._set.buckets:
            bucket.finalize()
        self.drop()

    # -- for the records -----------------------------------------------------------------------

    def close_times(self, ready_seconds: Sequence[float], now: float) -> tuple[BucketTimes, ...]:
        """Return the times of buckets that were done by `now`. `ready_seconds`: by parameter, 0.0 is not ready."""
        timers, self._timers = self._timers, []
        return tuple(
            timer.close(bucket, ready_seconds, now)
            for timer, bucket in zip(timers, self._set.buckets, strict=True)
        )

    def changed_layout(self) -> BucketLayout | None:
        """Return what is in the buckets, when it is not what was returned last."""
        buckets, names = self._set.buckets, self._set.table.names
        if buckets is self._described:
            return None
        before, self._described = self._described, buckets
        if len(before) == len(buckets) and all(a is b for a, b in zip(before, buckets, strict=True)):
            return None
        facts = tuple(_facts(bucket, names) for bucket in buckets)
        return BucketLayout(self._open_route.name, facts, self._open_route.number or 0)


class BucketTimer:
    """The times of one launched bucket."""

    def __init__(self, launch_seconds: float, work: Waitable) -> None:
        self.launch_seconds = launch_seconds
        self._work = work
        self._done_seconds = 0.0
        if isinstance(work, dist.Work) and _host_knows_end(work):
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
            details = (work.wait_seconds, work.codec_seconds, max(1, work.rounds))
        else:
            begin, end, details = launch, self._done_seconds or now, (0.0, 0.0, 1)
        return BucketTimes(bucket.nbytes, bucket.sent_bytes, first, last, launch, begin, end, *details)


def _host_knows_end(work: dist.Work) -> bool:
    """An accelerator's future is done when its work is queued, which says nothing."""
    return not torch.cuda.is_available()


def _facts(bucket: Bucket, names: Sequence[str]) -> BucketFacts:
    codec = bucket.made.spec.to_text() if isinstance(bucket, CodedBucket) else "none"
    return BucketFacts(bucket.nbytes, codec, tuple(names[index] for index in bucket.members))


def _refuse_difference_of_steps(world: World, steps: int, exchanges: int) -> None:
    """Raise `Mismatch` that names the ranks; to be called by all of them."""
    gathered: Sequence[int] = all_gather_json(world, "comparing optimizer steps", steps)
    parties = [
        f"{made} on {name_ranks([rank for rank, other in enumerate(gathered) if other == made])}"
        for made in sorted(set(gathered))
    ]
    raise Mismatch(
        f"gradients of different steps met in exchange {exchanges + 1}: optimizer steps made before it are "
        + ", ".join(parties),
        rank=world.rank,
        operation="all-reduce",
        remedy="in every step, the backward pass of every rank must reach the model (add 0 * model(x).sum() to a "
        "loss that does not), or no rank makes the step",
    )
