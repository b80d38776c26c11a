"""What may be added up over ranks, how it is added up, and what is refused with its values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from farandole.comm.messages.reduce_rules import accumulates_in_fp32, check_pair, check_sum, sum_into

ADDED = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.int8, torch.int64,
    torch.uint8,
]  # fmt: skip


@pytest.mark.parametrize("dtype", ADDED)
@pytest.mark.parametrize("count", [2, 3, 5])
def test_sums_are_those_of_exact_arithmetic_rounded_once(dtype: torch.dtype, count: int) -> None:
    rows = [torch.arange(6).to(dtype) + number for number in range(count)]
    kept = [row.clone() for row in rows[1:]]
    expected = torch.stack([row.to(torch.complex128) for row in rows]).sum(0)
    out = torch.empty(6, dtype=dtype)
    sum_into(out, rows, 1)
    assert torch.equal(out.to(torch.complex128), expected)
    if dtype.is_floating_point or dtype.is_complex:
        sum_into(rows[0], rows, 4)
        assert torch.equal(rows[0].to(torch.complex128), expected / 4), "in the first one's place"
    assert all(torch.equal(*pair) for pair in zip(rows[1:], kept, strict=True)), "the others are read only"


def test_narrow_floats_are_added_up_and_divided_in_float32() -> None:
    out = torch.empty(1, dtype=torch.bfloat16)
    sum_into(out, [torch.tensor([value]).bfloat16() for value in (1.0, *[2.0**-9] * 4)], 1)
    assert out == 1 + 2.0**-7, "one after the other, each would be rounded away"
    top = torch.tensor([60000.0]).half()
    half = torch.empty(1, dtype=torch.float16)
    sum_into(half, [top, top], 2)
    assert half == 60000, "the sum is more than the type holds"


def test_which_floats_are_narrow() -> None:
    assert [accumulates_in_fp32(dtype) for dtype in ADDED] == [True, True, *[False] * 6]
    assert accumulates_in_fp32(torch.float8_e5m2)


@pytest.mark.parametrize("dtype", [*ADDED, torch.float8_e4m3fn])
def test_what_can_be_added_up_is_taken(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3).to(dtype)
    check_sum(tensor, average=False)
    if dtype.is_floating_point or dtype.is_complex:
        check_sum(tensor, average=True)
        return
    with pytest.raises(ValueError, match=f"the average of {dtype}: expected a floating-point tensor"):
        check_sum(tensor, average=True)


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
        check_sum(tensor, average=False)


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
