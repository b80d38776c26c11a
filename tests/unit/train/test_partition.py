"""Dividing an epoch: every sample once, factors that add up, equal steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.train.data.partition import Partition


@given(
    size=st.integers(1, 8), whole=st.integers(1, 40), total=st.integers(0, 200),
    drop_last=st.booleans(), placeholders=st.booleans(),
)  # fmt: skip
def test_every_sample_once(size: int, whole: int, total: int, drop_last: bool, placeholders: bool) -> None:
    whole = max(whole, size)
    partitions = [Partition(rank, size, whole, drop_last, placeholders) for rank in range(size)]
    parts = [list(partition.parts(total)) for partition in partitions]
    for partition, own in zip(partitions, parts, strict=True):
        assert len(own) == partition.steps(total)
    expected = total - total % whole if drop_last else total
    seen = sorted(p for own in parts for part in own if part.samples for p in part.positions)
    assert seen == list(range(expected))
    if placeholders:
        assert len({len(own) for own in parts}) == 1
        for row in zip(*parts, strict=True):
            assert sum(part.factor for part in row) == pytest.approx(size)
            assert all(part.positions for part in row), "a placeholder has something to run"


def test_the_joined_batch_is_contiguous() -> None:
    rows = [list(Partition(rank, 3, 6).parts(14)) for rank in range(3)]
    assert [list(part.positions) for part in rows[0]] == [[0, 1], [6, 7], [12]]
    assert [list(part.positions) for part in rows[2]] == [[4, 5], [10, 11], [0]]
    assert rows[2][2].factor == 0.0
    assert rows[0][2].factor == 1.5
