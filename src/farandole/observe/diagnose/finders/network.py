"""The link as the buckets of a run show it, and what another codec or bucket size would make of the same step.

[Note: replaying a step] A bucket leaves when it is ready and the one before it has arrived; it takes ``bytes /
bandwidth + rounds x latency``. What of this lies behind the end of computing is exposed. Bandwidth and latency
are fitted to how long the buckets took. What a prediction changes is only bytes, rounds or the division into
buckets. What was measured beyond the replay is taken to stay; where less was measured, gains shrink alike.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ....core.vocabulary.comm_cost import LinkFit, communication_seconds, fit_link
from ....core.vocabulary.events import BucketTimes
from ...figures.waits import wires_of
from ..facts.step_table import Grid, mean

_USUAL_SHARE = 0.9


@dataclass(frozen=True)
class BucketObservation:
    """One bucket of a typical step: medians over steps. Times are seconds after the end of computing."""

    nbytes: float
    sent_bytes: float
    first_ready: float
    ready: float
    """When it was launched on the last rank."""
    rounds: float
    seconds: float
    """What it took, once its turn had come."""
    codec_seconds: float


@dataclass(frozen=True)
class LinkObservation:
    """A typical exchange."""

    link: LinkFit
    buckets: Sequence[BucketObservation]
    exposed_seconds: float
    """Measured, mean."""
    hidden_seconds: float
    """On the wire behind computing: measured, mean. See [Note: when a bucket is on the wire]."""
    busy_seconds: float
    """How long something is on the wire: measured, mean. What a rank waits may be more: for a core, too."""
    uneven_seconds: float
    """By how much a mean exchange is on the wire longer than the middle one: what a few long ones cost."""

    @property
    def sent_bytes(self) -> float:
        """Of one exchange, by one rank."""
        return sum(bucket.sent_bytes for bucket in self.buckets)

    @property
    def bucket_bytes(self) -> float:
        """Of a usual bucket."""
        return statistics.median([bucket.nbytes for bucket in self.buckets])

    @property
    def latency_seconds(self) -> float:
        """Of all rounds of an exchange."""
        return sum(bucket.rounds for bucket in self.buckets) * self.link.latency_seconds

    def exposed_with(
        self, buckets: Sequence[BucketObservation], *, ratio: float = 1.0, codec_seconds_per_byte: float = 0.0
    ) -> float:
        """Return the exposed time with other buckets, or `ratio` times the bytes and a codec that makes them."""
        base = replay(self.link, self.buckets)
        other = replay(self.link, buckets, ratio=ratio, codec_seconds_per_byte=codec_seconds_per_byte)
        trust = min(1.0, self.exposed_seconds / base) if base > 0 else 1.0
        return self.exposed_seconds - trust * (base - other)

    def rebucketed(self, bucket_bytes: float) -> list[BucketObservation]:
        """Return the buckets that another size would give. Gradients of a bucket are taken to come evenly."""
        total = sum(bucket.nbytes for bucket in self.buckets)
        if total <= 0:
            return list(self.buckets)
        rounds = statistics.median([bucket.rounds for bucket in self.buckets])
        count = max(1, round(total / bucket_bytes))
        ratio = self.sent_bytes / total
        made = []
        for number in range(count):
            begin, end = total * number / count, total * (number + 1) / count
            first, last = self._ready_at(begin), self._ready_at(end)
            made.append(BucketObservation(end - begin, ratio * (end - begin), first, last, rounds, 0.0, 0.0))
        return made

    def _ready_at(self, nbytes: float) -> float:
        """Return when so many bytes of gradients were ready."""
        so_far = 0.0
        for bucket in self.buckets:
            if bucket.nbytes > 0 and so_far + bucket.nbytes >= nbytes - 0.5:
                part = min(1.0, (nbytes - so_far) / bucket.nbytes)
                return bucket.first_ready + part * (bucket.ready - bucket.first_ready)
            so_far += bucket.nbytes
        return self.buckets[-1].ready


def replay(
    link: LinkFit, buckets: Sequence[BucketObservation], *, ratio: float = 1.0, codec_seconds_per_byte: float = 0.0
) -> float:
    """Return how long after the end of computing the last bucket arrives. See [Note: replaying a step].

    A codec works on one bucket at a time, before it leaves, while others are on their way.
    """
    free = coded = -float("inf")
    for bucket in buckets:
        coded = max(coded, bucket.ready) + codec_seconds_per_byte * bucket.nbytes
        seconds = communication_seconds(
            ratio * bucket.sent_bytes, link.bytes_per_second, bucket.rounds, link.latency_seconds
        )
        free = max(free, coded) + seconds
    return max(0.0, free)


def network_of(grid: Grid, exposed_seconds: float) -> LinkObservation | None:
    """Return the typical exchange of a run; None where the buckets' times were not taken."""
    columns: dict[int, list[BucketObservation]] = {}
    hidden: list[float] = []
    lengths: list[float] = []
    count = _usual_count(grid)
    if count == 0:
        return None
    for rows in zip(*grid.rows, strict=True):
        wires = wires_of(rows, one_clock=grid.one_clock)
        wire = wires[-1] if wires else None
        if wire is None or len(wire.spans) != count or any(len(row.exchanges) != len(wires) for row in rows):
            continue
        exchanges = [row.exchanges[-1] for row in rows]
        own = [exchange.buckets for exchange in exchanges]
        for number, seconds in enumerate(wire.turns):
            columns.setdefault(number, []).append(
                _bucket(own, number, [e.wait_begin_seconds for e in exchanges], max(1e-7, seconds))
            )
        lengths.append(wire.busy_seconds)
        hidden.append(wire.hidden_seconds)
    if not columns:
        return None
    buckets = _as_long_together([_median(columns[number]) for number in range(count)], _usual_mean(lengths))
    link = fit_link([b.sent_bytes for b in buckets], [b.rounds for b in buckets], [b.seconds for b in buckets])
    if link is None:
        return None
    uneven = max(0.0, mean(lengths) - statistics.median(lengths))
    return LinkObservation(link, buckets, exposed_seconds, mean(hidden), mean(lengths), uneven)


def _as_long_together(buckets: Sequence[BucketObservation], seconds: float) -> list[BucketObservation]:
    """Return the buckets with their times stretched alike, so that together they take `seconds`.

    Of many short buckets each takes far longer in some steps than in the middle one, another one each time: the
    sum of the middle times is then much less than any step's.
    """
    together = sum(bucket.seconds for bucket in buckets)
    return [replace(bucket, seconds=bucket.seconds * seconds / together) for bucket in buckets]


def _usual_count(grid: Grid) -> int:
    counts = [len(row.exchanges[-1].buckets) for own in grid.rows for row in own if row.exchanges]
    return statistics.mode(counts) if counts else 0


def _bucket(
    own: Sequence[Sequence[BucketTimes]], number: int, ends: Sequence[float], seconds: float
) -> BucketObservation:
    # The rank that was last to be ready is the nearest to the end of its computing.
    ready = [buckets[number].launch_seconds - end for buckets, end in zip(own, ends, strict=True)]
    last = max(range(len(own)), key=lambda rank: ready[rank])
    chosen = own[last][number]
    first = chosen.first_ready_seconds if chosen.first_ready_seconds is not None else chosen.launch_seconds
    return BucketObservation(
        chosen.nbytes, statistics.median([b[number].sent_bytes for b in own]), min(0.0, first - ends[last]),
        min(0.0, ready[last]), chosen.rounds, seconds, chosen.codec_seconds,
    )  # fmt: skip


def _median(values: Sequence[BucketObservation]) -> BucketObservation:
    def middle(name: str) -> float:
        return float(statistics.median([getattr(value, name) for value in values]))

    return BucketObservation(
        middle("nbytes"), middle("sent_bytes"), middle("first_ready"), middle("ready"), middle("rounds"),
        middle("seconds"), middle("codec_seconds"),
    )  # fmt: skip


def _usual_mean(values: Sequence[float]) -> float:
    """Return the mean without the longest tenth: a stall now and then is no property of the link."""
    usual = sorted(values)[: max(1, math.floor(_USUAL_SHARE * len(values)))]
    return mean(usual)
