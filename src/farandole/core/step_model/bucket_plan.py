"""Which gradients share a bucket: one rule for the reducer, which builds buckets, and for predictions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ..vocabulary.codec_spec import NONE


class Sized(Protocol):
    """What goes into a bucket."""

    @property
    def nbytes(self) -> int:
        """Bytes, uncompressed."""


Item = TypeVar("Item", bound=Sized)


@dataclass(frozen=True)
class BucketPlan:
    """How the gradients of a step are divided into buckets, and which codec each bucket has."""

    codecs: Mapping[str, str]
    """Text of the codec by parameter name; ``none`` for a parameter that is not in it."""
    bucket_bytes: int
    """The most bytes of a bucket, uncompressed."""
    first_bucket_bytes: int | None = None
    """The most bytes of the first bucket: a smaller one leaves earlier. None: as the others."""

    def codec_of(self, name: str) -> str:
        """Return the codec of a parameter."""
        return self.codecs.get(name, NONE)


def plan_buckets(
    items: Sequence[Item], *, key: Callable[[Item], Hashable], first_bytes: int, limit_bytes: int
) -> list[list[Item]]:
    """Divide `items`, given in the order in which gradients become ready, into buckets.

    Items of one bucket have the same key (dtype, device, codec); a key of None makes a bucket of its own. A bucket
    is closed when the next item would make it larger than `limit_bytes` (the first: `first_bytes`), so a larger
    item is alone. Several keys are open at a time. Buckets come in the order in which their last item is ready,
    which is the order to launch them in. This is DDP's assignment by size, Li et al., "PyTorch Distributed:
    Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.2.3.
    """
    closed: list[tuple[int, list[Item]]] = []
    open_buckets: dict[Hashable, tuple[int, int, list[Item]]] = {}  # key -> last position, bytes, items
    for position, item in enumerate(items):
        group = key(item)
        if group is None:
            closed.append((position, [item]))
            continue
        last, nbytes, members = open_buckets.get(group, (position, 0, []))
        if members and nbytes + item.nbytes > (limit_bytes if closed else first_bytes):
            closed.append((last, members))
            nbytes, members = 0, []
        members.append(item)
        open_buckets[group] = (position, nbytes + item.nbytes, members)
    closed += [(last, members) for last, _, members in open_buckets.values()]
    return [members for _, members in sorted(closed, key=lambda bucket: bucket[0])]
