"""What one exchange has under way: buckets in the agreed order and what rides with them, until all have landed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from ...core.vocabulary.events import BucketTimes
from ..buckets.bucket import Waitable
from ..buckets.bucket_set import BucketSet
from ..buckets.timing import BucketTimer
from ..routes.route import Route
from ..world.comm_errors import start_all_reduce, translated
from ..world.world import World
from .options import ExtraTensors


class InFlightBuckets:
    """An engine's buckets that have been launched and not been waited for, exchange by exchange."""

    def __init__(self, world: World, buckets: BucketSet, connected: Callable[[], Route]) -> None:
        """`connected` gives what buckets travel by, or raises."""
        self._world, self._set, self._connected = world, buckets, connected
        self._riders: list[ExtraTensors] = []
        self._works: list[Waitable] = []
        self._rider_works: list[tuple[ExtraTensors, dist.Work]] = []
        self._times: list[BucketTimer] = []
        self.launched = 0
        """How many buckets of this exchange are, from the first on."""
        self._steps: int | None = None

    def add_rider(self, rider: ExtraTensors) -> None:
        """Take `rider` along from the next exchange on."""
        self._riders.append(rider)

    def settle_riders(self) -> None:
        """Have the riders agree on what will travel; once, in the first pass."""
        for rider in self._riders:
            rider.settle()

    def begin(self, steps: int | None) -> None:
        """Begin an exchange: nothing is launched. `steps`: of this rank's optimizers so far; see `step_marks`."""
        self.launched = 0
        self._steps = steps
        self._works, self._times = [], []

    def count_no_steps(self) -> None:
        """Agree with whatever the others say of their steps in this exchange."""
        self._steps = None

    def forget(self) -> None:
        """Let go of everything: nobody waits any more."""
        self._works, self._rider_works = [], []

    # -- launching -----------------------------------------------------------------------------

    def launch_riders(self, factor: float) -> None:
        """Launch what rides along, weighted by this rank's `factor`; before the first bucket."""
        self._rider_works = []
        for rider in self._riders:
            tensor = rider.load(factor / self._world.size)
            if tensor is not None:
                with translated(self._world, "all-reduce of buffers"):
                    work = start_all_reduce(tensor, self._connected().group)
                self._rider_works.append((rider, work))

    def launch_complete(self, factor: float) -> None:
        """Launch, in the agreed order, every bucket up to the first that is not complete."""
        buckets = self._set.buckets
        while self.launched < len(buckets) and buckets[self.launched].missing <= 0:
            self._launch_next(factor)

    def launch_rest(self, factor: float) -> None:
        """Launch all that are left, complete or not."""
        while self.launched < len(self._set.buckets):
            self._launch_next(factor)

    def _launch_next(self, factor: float) -> None:
        bucket = self._set.buckets[self.launched]
        try:
            bucket.load(factor)
        except RuntimeError as problem:
            raise self._set.explain_load(bucket, problem) from None
        bucket.mark(self._steps)
        self._set.owed.add_to(bucket)
        launch = time.monotonic()
        with translated(self._world, "all-reduce", bucket=self.launched):
            work = bucket.launch(self._connected())
        self._works.append(work)
        self._times.append(BucketTimer(launch, work))
        self.launched += 1

    # -- landing -------------------------------------------------------------------------------

    def land(self) -> bool:
        """Wait for everything, and put it where it belongs.

        Returns False, on all ranks, and leaves the sums where they are, when these are of different steps.
        """
        for position, work in enumerate(self._works):
            self._wait(work, "all-reduce", position)
        for rider, work in self._rider_works:
            self._wait(work, "all-reduce of buffers", None)
            rider.land()
        if self._set.marked is not None and self._set.marked.marks_differ:
            return False
        for bucket in self._set.buckets:
            bucket.land()
        self.forget()
        return True

    def close_times(self, ready_seconds: Sequence[float], now: float) -> tuple[BucketTimes, ...]:
        """Return the times of buckets that landed by `now`. `ready_seconds`: by parameter, 0.0 is not ready."""
        times, self._times = self._times, []
        return tuple(
            work.close(bucket, ready_seconds, now) for work, bucket in zip(times, self._set.buckets, strict=True)
        )

    def _wait(self, work: Waitable, operation: str, bucket: int | None) -> None:
        with translated(self._world, operation, bucket=bucket):
            work.wait()
