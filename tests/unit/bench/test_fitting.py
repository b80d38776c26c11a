"""Which tensors segmented collectives take, and what is refused with its values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from farandole.bench.collectives.fitting import check_pair, check_sum

ADDED = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.int8, torch.int64,
    torch.uint8,
]  # fmt: skip


@pytest.mark.parametrize("dtype", [*ADDED, torch.float8_e4m3fn])
def test_what_can_be_added_up_is_taken(dtype: torch.dtype) -> None:
    check_sum(torch.zeros(3).to(dtype))


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.zeros(2, dtype=torch.uint16), "the sum of torch.uint16: torch cannot add"),
        (torch.zeros(2, device="meta"), "tensor on meta"),
        (torch.zeros(2).to_sparse(), "a torch.sparse_coo tensor on cpu"),
    ],
)
def test_what_cannot_be_added_up_is_refused(tensor: torch.Tensor, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_sum(tensor)


@pytest.mark.parametrize(
    ("whole", "part", "text"),
    [
        (torch.zeros(6), torch.zeros(2, dtype=torch.int32), "in is torch.float32, out torch.int32"),
        (torch.zeros(5), torch.zeros(2), r"in of shape \(5,\) has 5 elements, expected 3 x 2 for out"),
        (torch.zeros(2, 3).t(), torch.zeros(2), r"in of shape \(3, 2\) has strides \(1, 3\)"),
        (torch.zeros(6), torch.zeros(4)[::2], r"out of shape \(2,\) has strides \(2,\)"),
        (torch.zeros(6, device="meta"), torch.zeros(2), "on meta"),
        (torch.zeros(6), torch.zeros(2, device="meta"), "on meta"),
    ],
)
def test_a_whole_that_is_not_its_parts_is_refused(whole: torch.Tensor, part: torch.Tensor, text: str) -> None:
    arguments: dict[str, Any] = {"names": ("in", "out"), "size": 3}
    check_pair("reduce-scatter", whole=torch.zeros(3, 2), part=torch.zeros(2), **arguments)
    with pytest.raises(ValueError, match=text):
        check_pair("reduce-scatter", whole=whole, part=part, **arguments)
