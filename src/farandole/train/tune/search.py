"""Which setting is tried next: the best by the step model first, then neighbours of what is best so far.

[Note: a pattern search] Bucket sizes lie on a grid of powers of two. From the setting in force the size is tried
two places up and down, then one; whatever is adopted is the middle of the next round. So a size that the step
model got wrong by a factor of 2^k takes about k/2 + 4 trials to correct, where steps are shortest at one size and
longer the further from it. Then the size of the first bucket and the number of connections are searched alike.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ...core.step_model.exchange_keys import ExchangeKeys
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
    tried: set[Hashable] = field(default_factory=set)

    def next(self, incumbent: ExchangeKeys) -> ExchangeKeys | None:
        """Return the next setting to try; None: all that this search would try were tried."""
        self.tried.add(self.layout(incumbent))
        for keys in self._wanted(incumbent):
            if self.layout(keys) not in self.tried:
                self.tried.add(self.layout(keys))
                return keys
        return None

    def _wanted(self, incumbent: ExchangeKeys) -> Iterator[ExchangeKeys]:
        if self.is_settled:
            yield from self.predicted[:1]
            return
        yield from self.predicted[:_MOST_PREDICTED]
        if "bucket_bytes" in self.names:
            yield from self._other_sizes(incumbent)
        if "first_bucket_bytes" in self.names:
            yield from self._other_first_sizes(incumbent)
        if "connections" in self.names and self.by_messages(incumbent):
            for count in _CONNECTIONS:
                yield replace(incumbent, connections=count)

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
