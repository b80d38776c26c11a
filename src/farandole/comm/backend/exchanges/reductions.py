"""How rows of all ranks become one: the reduce operations of `torch.distributed`, and which types each takes.

Floats of 16 bits and less are combined in float32 and rounded once. Rows are combined in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...messages.reduce_rules import accumulates_in_fp32, sum_into

_PAIRWISE: dict[str, Callable[..., torch.Tensor]] = {
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_NAMES = ("SUM", "AVG", *_PAIRWISE)
_BITWISE = ("BAND", "BOR", "BXOR")
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def name_of(operation: Any, dtype: torch.dtype) -> str:
    """Return the name of a `ReduceOp`, such as "SUM".

    Raises:
        NotImplementedError: for an operation or a type that is not there.
        ValueError: for an operation that means nothing for the type.
    """
    name = next((known for known in _NAMES if operation == getattr(dist.ReduceOp, known)), None)
    if name is None:
        raise NotImplementedError(f"farandole: reduce operation {operation}: there are {', '.join(_NAMES)}")
    if not (dtype in _INTEGERS or dtype.is_floating_point or dtype.is_complex):
        raise NotImplementedError(f"farandole: {name} of {dtype}")
    if name in _BITWISE and dtype not in _INTEGERS:
        raise ValueError(f"farandole: {name} of {dtype}: expected whole numbers")
    if name in ("MIN", "MAX") and dtype.is_complex:
        raise ValueError(f"farandole: {name} of {dtype}: complex numbers have no order")
    if name == "AVG" and dtype == torch.bool:
        raise ValueError(f"farandole: AVG of {dtype}: expected numbers")
    return name


def combine(out: torch.Tensor, rows: Sequence[torch.Tensor], name: str, divisor: int = 0) -> None:
    """Write the rows, one a rank, combined by the operation `name`, into `out`, which may be one of them.

    Args:
        out: of the type of the rows; or float32 for rows of 16 bits and less, or those for rows of float32, whose
            first is of no use afterwards.
        rows: at least one.
        name: see `name_of`.
        divisor: of a mean; 0: the number of rows.
    """
    if out.dtype != rows[0].dtype and not accumulates_in_fp32(out.dtype):
        rows = [row.to(out.dtype) for row in rows]
    # The first two are read before anything is written.
    rows = [*rows[:2], *(row.clone() if row.data_ptr() == out.data_ptr() else row for row in rows[2:])]
    if len(rows) == 1:
        out.copy_(rows[0])
    elif name == "SUM":
        sum_into(out, rows, 1)
    elif name == "AVG":
        sum_into(out, rows, divisor or len(rows))
    else:
        pair = _PAIRWISE[name]
        wide = accumulates_in_fp32(out.dtype)
        total = pair(_widened(rows[0], wide), _widened(rows[1], wide))
        for row in rows[2:]:
            total = pair(total, _widened(row, wide))
        out.copy_(total)


def summed_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type of sums that are not the last one: with it each number is rounded once."""
    return torch.float32 if accumulates_in_fp32(dtype) else dtype


def _widened(row: torch.Tensor, wide: bool) -> torch.Tensor:
    return row.float() if wide else row
