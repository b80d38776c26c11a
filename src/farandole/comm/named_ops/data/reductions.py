"""Sums, averages and scales: in which precision, and how they are rounded.

[Note: rounding] Floats of 16 bits and less are added up in float32, in the order of ranks, and rounded once, at
the end. A factor is rounded to float32 for floats of 32 bits and less, as Horovod's is; others are multiplied in
float64, and integers truncated toward zero. An average is the sum divided by the number of members: exactly for
floats, truncated toward zero for integers. Booleans: sum and max are "or", product and min are "and".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...messages.reduce_rules import accumulates_in_fp32, divide

_NO_ADDITION = (torch.uint16, torch.uint32, torch.uint64)


def refuse_reduction(dtype: torch.dtype, reduction: str) -> str:
    """Return why `reduction` of `dtype` is impossible; empty when it is possible."""
    if dtype in _NO_ADDITION:
        return "torch does not add this type up"
    if dtype.is_complex and reduction in ("min", "max", "adasum"):
        return "complex numbers have no order" if reduction != "adasum" else "adasum takes real numbers"
    if dtype == torch.bool and reduction in ("average", "adasum"):
        return "truth values have no average"
    if reduction == "adasum" and not dtype.is_floating_point:
        return "adasum takes floating-point numbers"
    return ""


def scale(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return `tensor` times `factor` in its own type; `tensor` itself when the factor is 1."""
    if factor == 1.0:
        return tensor
    dtype = tensor.dtype
    if accumulates_in_fp32(dtype):
        return (tensor.float() * factor).to(dtype)
    if dtype.is_complex:
        return (tensor.to(torch.complex128) * factor).to(dtype)
    if dtype == torch.float32:
        return tensor * torch.tensor(factor, dtype=torch.float32)
    if dtype.is_floating_point:
        return (tensor.double() * factor).to(dtype)
    return (tensor.double() * factor).trunc_().to(dtype)


def fold(rows: Sequence[torch.Tensor], reduction: str, *, zeros_too: bool = False) -> torch.Tensor:
    """Return `rows` reduced in order; the first may be overwritten. Narrow floats come back in float32.

    `zeros_too`: members are absent, and contribute zeros.
    """
    narrow = accumulates_in_fp32(rows[0].dtype)
    total = rows[0].float() if narrow else rows[0]
    for row in rows[1:]:
        _fold_in(total, row.float() if narrow else row, reduction)
    if zeros_too:
        _fold_in(total, torch.zeros_like(total), reduction)
    return total


def _fold_in(total: torch.Tensor, row: torch.Tensor, reduction: str) -> None:
    if reduction == "min":
        torch.minimum(total, row, out=total)
    elif reduction == "max":
        torch.maximum(total, row, out=total)
    elif reduction == "product":
        total.mul_(row)
    elif total.dtype == torch.bool:
        total.logical_or_(row)
    else:
        total.add_(row)


def finish(total: torch.Tensor, dtype: torch.dtype, reduction: str, size: int, postscale: float) -> torch.Tensor:
    """Divide and scale what `fold` returned, and round it to `dtype`. `size` counts absent members too."""
    if reduction == "average":
        if postscale == 1.0:
            divide(total, size)
        else:
            postscale /= size
    scaled = scale(total, postscale)
    return scaled if scaled.dtype == dtype else scaled.to(dtype)
