"""Sums, averages and scales: in which precision, and how they are rounded.

[Note: rounding] Floats of 16 bits and less are added up in float32, in the order of ranks, and rounded once, at
the end. A factor is rounded to float32 for floats of 32 bits and less, as Horovod's is; others are multiplied in
float64, and integers truncated toward zero. An average is the sum divided by the number of members: exactly for
floats, truncated toward zero for integers. Booleans: sum and max are "or", product and min are "and".
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch

from ...comm.messages import Message, accumulates_in_fp32, divide

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


# Adasum: a sum that does not count twice what two gradients have in common.
#
# For two: ``(1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b``; for more: neighbours in pairs, level by level, in the
# order of ranks. When a level has an odd number the last one goes up as it is, so any number of ranks is
# possible; for powers of two it is the published tree. Source: Maleki et al., "Scaling Distributed Training with
# Adaptive Summation", 2020.
#
# Each rank holds one piece of every rank's vector. The products of a level are added up over the pieces in
# float64, in the order of ranks, so all ranks use the same coefficients.

Products = Generator[Message, torch.Tensor, torch.Tensor]


def adasum(rows: Sequence[torch.Tensor], *, shared: bool) -> Products:
    """Return the Adasum of the whole vectors, of which `rows` are this rank's pieces, one a rank.

    `rows`: float32 or float64, 1-D. `shared`: the other pieces are on other ranks, so each level is one round of
    messages; otherwise no message is needed.
    """
    level = list(rows)
    while len(level) > 1:
        pairs = [(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        products = torch.stack([_products(a, b) for a, b in pairs])
        if shared:
            everyone = yield Message(products, "all_gather")
            products = everyone[0].clone()
            for other in everyone[1:]:
                products += other
        combined = [_combine(a, b, *products[i].tolist()) for i, (a, b) in enumerate(pairs)]
        level = combined + level[2 * len(pairs) :]
    return level[0]


def _products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = a.double(), b.double()
    return torch.stack([a.dot(a), b.dot(b), a.dot(b)])


def _combine(a: torch.Tensor, b: torch.Tensor, aa: float, bb: float, ab: float) -> torch.Tensor:
    of_a = 1.0 - ab / (2.0 * aa) if aa else 1.0
    of_b = 1.0 - ab / (2.0 * bb) if bb else 1.0
    return a * of_a + b * of_b
