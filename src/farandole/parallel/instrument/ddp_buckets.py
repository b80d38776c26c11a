"""The buckets of a stock DistributedDataParallel, timed by a hook that does what it does without one.

[Note: the same bits as unobserved] Without a hook the reducer multiplies each gradient by 1/N while it copies
it into the bucket, and sums. With one it copies, so the hook multiplies: the same products, the same sum, one
more pass over the bucket. N is the group's size; under ``join(divide_by_initial_world_size=False)`` the
reducer divides by those that are left, which a hook cannot know.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ...core.step_model.comm_cost import ring_sent_bytes
from ...core.vocabulary.events import BucketTimes


def watch_buckets(model: DistributedDataParallel) -> Callable[[], tuple[BucketTimes, ...]]:
    """Time the buckets of `model`; return what gives, and forgets, those of the exchange that has ended.

    A model that has a communication hook keeps it, and its buckets are not seen.
    """
    buckets = _watched.get(model)
    if buckets is None:
        buckets = _watched[model] = _Buckets(model.process_group)
        if not getattr(model, "_comm_hooks", None) and model.logger is not None:
            # The reducer reads annotations, and refuses those that are texts.
            try:
                model.register_comm_hook(None, lambda state, bucket: buckets.reduce(bucket))
            finally:  # the hook is the reducer's; this list would be saved with the model
                getattr(model, "_comm_hooks", []).clear()
    return buckets.take


_watched: weakref.WeakKeyDictionary[DistributedDataParallel, _Buckets] = weakref.WeakKeyDictionary()


class _Buckets:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._open: list[list[Any]] = []

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        tensor = bucket.buffer()
        size = self._group.size()
        tensor.mul_(1.0 / size)
        nbytes = tensor.numel() * tensor.element_size()
        times: list[Any] = [nbytes, ring_sent_bytes(nbytes, size), time.monotonic(), 0.0]
        self._open.append(times)
        work = dist.all_reduce(tensor, group=self._group, async_op=True)
        assert work is not None, "an asynchronous collective returns its work"

        def done(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            times[3] = time.monotonic()
            return future.value()[0]

        made: torch.futures.Future[torch.Tensor] = work.get_future().then(done)
        return made

    def take(self) -> tuple[BucketTimes, ...]:
        closed, self._open = self._open, []
        now = time.monotonic()
        return tuple(
            BucketTimes(nbytes, sent, None, launch, launch, launch, end or now)
            for nbytes, sent, launch, end in closed
        )
