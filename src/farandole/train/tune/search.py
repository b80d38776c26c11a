"""Which setting is tried next: the best by the step model first, then neighbours of what is best so far.

[Note: a pattern search] Bucket sizes lie on a grid of powers of two. From the setting in force the size is tried
two places up and down, then one; whatever is adopted is the middle of the next round. So a size that the step
model got wrong by a factor of 2^k takes about k/2 + 4 trials to correct, where steps are shortest at one size and
longer the further from it. Then the size of the first bucket and the number of connections are searched alike.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ...core.step_model.bucket_plan import ExchangeKeys
from ...core.vocabulary.codec_spec import NONE

LEAST_BUCKET_BYTES = 2**18
_STRIDES = (2, 1)
_CONNECTIONS = (1, 2, 4)
_MOST_PREDICTED = 4
"""Settings of the step model that are tried, whatever came of the first."""


def bucket_grid(gradient_bytes: int) -> tuple[int, ...]:
    """Return the bucket sizes to choose from, ascending: powers of two, the last one holds all gradients."""
    sizes = [LEAST_BUCKET_BYTES]
    while sizes[-1] < gradient_bytes:
        sizes.append(2 * sizes[-1])
    return tuple(sizes)


def _as_it_is(keys: ExchangeKeys) -> Hashable:
    return keys


@dataclass
class PatternSearch:
    """A `decision.Search` of the keys of the exchange. See [Note: a pattern search]."""

    predicted: Sequence[ExchangeKeys]
    """The best by the step model, the best one first."""
    sizes: Sequence[int]
    """Bucket sizes, ascending."""
    names: Sequence[str]
    """Keys that may change."""
    layout: Callable[[ExchangeKeys], Hashable] = _as_it_is
    """What tells settings apart: two of the same buckets are one."""
    by_messages: Callable[[ExchangeKeys], bool] = lambda keys: keys.codec != NONE or keys.route == "hierarchical"
    """Whether buckets travel over connections of our own, which `connections` counts."""
    is_settled: bool = False
    """Whether an earlier run has searched around the first of `predicted`, so that only that is tried."""
    most_micro_batches: int = 1
    """Samples of the smallest batch of a rank: no larger number of micro-batches is tried."""
    has_room: bool = False
    """Whether all ranks have memory for larger micro-batches than those in force."""
    tried: set[Hashable] = field(default_factory=set)

    def next(self, incumbent: ExchangeKeys, *, is_exchange_hidden: bool = False) -> ExchangeKeys | None:
        """Return the next setting to try; None: all that this search would try were tried."""
        keys = self._first_untried(incumbent, is_exchange_hidden=is_exchange_hidden)
        if keys is not None:
            self.tried.add(self.layout(keys))
        return keys

    def has_more(self, incumbent: ExchangeKeys) -> bool:
        """Return whether a setting that changes computation, and not only the exchange, was not tried yet."""
        return self._first_untried(incumbent, is_exchange_hidden=True) is not None

    def _first_untried(self, incumbent: ExchangeKeys, *, is_exchange_hidden: bool) -> ExchangeKeys | None:
        self.tried.add(self.layout(incumbent))
        wanted = self._other_micro_batches(incumbent) if is_exchange_hidden else self._wanted(incumbent)
        fitting = (keys for keys in wanted if self._fits(keys, incumbent))
        return next((keys for keys in fitting if self.layout(keys) not in self.tried), None)

    def _fits(self, keys: ExchangeKeys, incumbent: ExchangeKeys) -> bool:
        """Return whether there is memory for the micro-batches of `keys`: as large as those in force, or twice."""
        number = keys.micro_batches
        return number >= incumbent.micro_batches or (self.has_room and 2 * number >= incumbent.micro_batches)

    def _wanted(self, incumbent: ExchangeKeys) -> Iterator[ExchangeKeys]:
        if self.is_settled:
            yield from self.predicted[:1]
            return
        for keys in self.predicted[:_MOST_PREDICTED]:
            yield replace(keys, micro_batches=incumbent.micro_batches)
        yield from self._other_micro_batches(incumbent)
        if "bucket_bytes" in self.names:
            yield from self._other_sizes(incumbent)
        if "first_bucket_bytes" in self.names:
            yield from self._other_first_sizes(incumbent)
        if "connections" in self.names and self.by_messages(incumbent):
            for count in _CONNECTIONS:
                yield replace(incumbent, connections=count)

    def _other_micro_batches(self, incumbent: ExchangeKeys) -> Iterator[ExchangeKeys]:
        """Yield half as many micro-batches, and twice as many; in a settled search those that were found."""
        number = incumbent.micro_batches
        if "micro_batches" not in self.names:
            return
        if self.is_settled:
            yield from (keys for keys in self.predicted[:1] if keys.micro_batches != number)
            return
        if number > 1:
            yield replace(incumbent, micro_batches=-(-number // 2))
        if 2 * number <= self.most_micro_batches:
            yield replace(incumbent, micro_batches=2 * number)

    def _other_sizes(self, incumbent: ExchangeKeys) -> Iterator[ExchangeKeys]:
        for size in self._around(incumbent.bucket_bytes):
            first = incumbent.first_bucket_bytes
            if first >= incumbent.bucket_bytes or first > size:
                first = size if "first_bucket_bytes" in self.names else first
            yield replace(incumbent, bucket_bytes=size, first_bucket_bytes=first)

    def _other_first_sizes(self, incumbent: ExchangeKeys) -> Iterator[ExchangeKeys]:
        for size in self._around(min(incumbent.first_bucket_bytes, incumbent.bucket_bytes)):
            if size <= incumbent.bucket_bytes:
                yield replace(incumbent, first_bucket_bytes=size)

    def _around(self, size: int) -> Iterator[int]:
        """Yield sizes of the grid around `size`: two places away, then one."""
        place = min(range(len(self.sizes)), key=lambda i: abs(self.sizes[i].bit_length() - size.bit_length()))
        for stride in _STRIDES:
            for other in (place + stride, place - stride):
                yield self.sizes[min(max(other, 0), len(self.sizes) - 1)]
