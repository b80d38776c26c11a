"""Planning buckets: pure, on sizes and types."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from farandole.comm.engine.buckets import ParamInfo, plan_buckets

CPU = torch.device("cpu")


def slots(*sizes: int, dtype: torch.dtype = torch.float32) -> list[ParamInfo]:
    return [ParamInfo(i, nbytes, dtype, CPU) for i, nbytes in enumerate(sizes)]


def indices(buckets: list[list[ParamInfo]]) -> list[list[int]]:
    return [[slot.index for slot in bucket] for bucket in buckets]


def test_the_first_bucket_is_small_and_a_large_gradient_is_alone() -> None:
    assert indices(plan_buckets(slots(4, 4, 4, 30, 4, 4, 4), first_bytes=8, limit_bytes=10)) == [
        [0, 1], [2], [3], [4, 5], [6],
    ]  # fmt: skip


def test_dtypes_do_not_mix_and_the_order_is_that_of_readiness() -> None:
    mixed = [
        ParamInfo(0, 4, torch.float32, CPU), ParamInfo(1, 2, torch.bfloat16, CPU),
        ParamInfo(2, 4, torch.float32, CPU),
        ParamInfo(3, 400, torch.float32, CPU, sparse=True), ParamInfo(4, 2, torch.bfloat16, CPU),
    ]  # fmt: skip
    assert indices(plan_buckets(mixed, first_bytes=100, limit_bytes=100)) == [[0, 2], [3], [1, 4]]


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 60), st.integers(1, 100))
def test_every_slot_is_in_one_bucket(sizes: list[int], first: int, limit: int) -> None:
    buckets = plan_buckets(slots(*sizes), first_bytes=first, limit_bytes=limit)
    assert [i for bucket in indices(buckets) for i in bucket] == list(range(len(sizes)))
    for bucket in buckets:
        assert len(bucket) == 1 or sum(slot.nbytes for slot in bucket) <= max(first, limit)
