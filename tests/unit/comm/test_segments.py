"""How a flat tensor is cut: whole blocks for each rank, not too small, not too many."""

from __future__ import annotations

import pytest

from farandole.comm.codecs.units import MULTIPLE, SEGMENT_ELEMENTS, segment_elements


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("most", [1, 7, 1023])
def test_segments_are_large_and_few(ranks: int, most: int) -> None:
    for total in (0, 1, MULTIPLE, 10**6, 10**9, 123_456_789_012):
        check(ranks, total, most)


def check(ranks: int, total: int, most: int) -> None:
    each = segment_elements(total, ranks, most)
    assert each % (MULTIPLE * ranks) == 0, "every rank adds up whole blocks"
    assert each * most >= total, "there are no more than can be told apart"
    assert each >= SEGMENT_ELEMENTS * ranks, "calls cost little beside memory"
    if each > SEGMENT_ELEMENTS * ranks:
        assert (each - MULTIPLE * ranks) * most < total, "no larger than it must be"
