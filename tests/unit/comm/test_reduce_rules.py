"""How tensors are added up over ranks."""

from __future__ import annotations

import pytest
import torch

from farandole.comm.messages import accumulates_in_fp32, sum_into

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
