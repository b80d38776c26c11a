"""Which gradients travel in one buffer, and where in it each one lies. Pure.

[Note: padded] Each gradient begins at a multiple of 64 bytes: TensorFlow then takes the buffer apart without a
copy, and what is sent grows by less than 64 bytes for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.vocabulary.codec_spec import NONE

PAD_BYTES = 64
"""See [Note: padded]."""


@dataclass(frozen=True)
class GradientPart:
    """One gradient that is to travel."""

    index: int
    """Its place in the list of gradients."""
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    codec: str = NONE
    alone: bool = False
    """Whether it travels in its own shape: for codecs that want a matrix."""
    group: int | None = None
    """The number of the group that it was put in; None: in none."""

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        count = 1
        for length in self.shape:
            count *= length
        return count

    @property
    def padded(self) -> int:
        """How many numbers it takes up in a buffer."""
        unit = max(1, PAD_BYTES // self.itemsize)
        return -(-self.elements // unit) * unit


@dataclass(frozen=True)
class FlatBucket:
    """Gradients that travel as one buffer."""

    parts: tuple[GradientPart, ...]

    @property
    def codec(self) -> str:
        """How it travels."""
        return self.parts[0].codec

    @property
    def is_whole(self) -> bool:
        """Whether it is one gradient in its own shape."""
        return self.parts[0].alone

    @property
    def nbytes(self) -> int:
        """Bytes of its gradients, without what pads them."""
        return sum(part.elements * part.itemsize for part in self.parts)

    @property
    def sizes(self) -> list[int]:
        """How many numbers each part takes up."""
        return [part.padded for part in self.parts]


def plan_buckets(parts: Sequence[GradientPart], bucket_bytes: int) -> list[FlatBucket]:
    """Return the buckets in the order in which they are likely to be complete.

    Gradients become ready from the last layer to the first, so buckets are filled from the end. A bucket has one
    type and one codec, and is closed when it has `bucket_bytes`; a group is a bucket of its own, however large.
    """
    open_ones: dict[tuple[str, str, int | None], list[GradientPart]] = {}
    closed: list[list[GradientPart]] = []
    for part in reversed(parts):
        if part.alone:
            closed.append([part])
            continue
        key = (part.dtype, part.codec, part.group)
        filled = open_ones.setdefault(key, [])
        if not filled:
            closed.append(filled)
        filled.append(part)
        if part.group is None and sum(each.padded * each.itemsize for each in filled) >= bucket_bytes:
            del open_ones[key]
    return [FlatBucket(tuple(sorted(bucket, key=lambda part: part.index))) for bucket in closed]
