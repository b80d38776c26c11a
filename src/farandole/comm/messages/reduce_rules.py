"""How tensors add up over ranks: in which precision, and what is rounded when."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch


@cache
def accumulates_in_fp32(dtype: torch.dtype) -> bool:
    """Return whether this is a float that is added up in float32."""
    return dtype.is_floating_point and dtype.itemsize < 4


def sum_into(out: torch.Tensor, rows: Sequence[torch.Tensor], divisor: int) -> None:
    """Write the sum of `rows`, two at least, over `divisor` into `out`, which may be the first of them.

    The mean of whole numbers is rounded toward zero, as NCCL does.
    """
    if accumulates_in_fp32(out.dtype):
        total = rows[0].float()
        for row in rows[1:]:
            total += row.float()  # torch adds no float8 to a float32
        divide(total, divisor)
        out.copy_(total)
        return
    torch.add(rows[0], rows[1], out=out)
    for row in rows[2:]:
        out.add_(row)
    if divisor != 1:
        divide(out, divisor)


def divide(total: torch.Tensor, divisor: int) -> None:
    """Make a sum a mean, with the CPU's bits; see `sum_into`."""
    if not (total.dtype.is_floating_point or total.dtype.is_complex):
        total.div_(divisor, rounding_mode="trunc")
    elif total.is_cpu:
        total.div_(divisor)
    else:  # by a number CUDA multiplies by its reciprocal, which is not its quotient in the last bit
        total.div_(torch.full((), divisor, dtype=total.dtype, device=total.device))
