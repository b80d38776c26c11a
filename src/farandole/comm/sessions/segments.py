"""How a flat tensor is cut into the segments that codecs get."""

from __future__ import annotations

SEGMENT_ELEMENTS = 512 * 1024
"""Elements of a segment that each rank adds up: large enough that calls cost little beside memory (measured)."""
MULTIPLE = 1024
"""Each rank's part of a segment is whole blocks of all codecs' default sizes."""


def segment_elements(total: int, ranks: int, most: int) -> int:
    """Return the elements of a segment of `total` elements, so that there are at most `most` segments."""
    multiple = MULTIPLE * ranks
    return max(SEGMENT_ELEMENTS * ranks, -(-total // (most * multiple)) * multiple)
