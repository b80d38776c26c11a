"""How many samples of a batch each rank gets, by how fast it is. Pure arithmetic.

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
from collections.abc import Sequence
from functools import lru_cache


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
