"""What was computed on a device, compared with the CPU: by bits, or to rounding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .script import Played

NEAR = 1e-3
"""Norm of a difference by that of what is compared: rounding, and the few numbers that it moves to another step of
a format."""
NEAR_PARAMETERS = 1e-5
"""The same of parameters whose gradients have equal bits: optimizers round in their own way on each device."""


def difference(played: Played, expected: Played, *, by_bits: bool) -> str:
    """Return the first thing in which a rank's training differs from the one expected; empty: nothing."""
    for number, (ours, theirs) in enumerate(zip(played.means, expected.means, strict=True)):
        found = first_difference(ours, theirs, near=0.0 if by_bits else NEAR)
        if found:
            return f"mean of step {number}: {found}"
    means = [mean for each in expected.means for mean in each if bool(torch.isfinite(mean).all())]
    found = first_difference(
        played.residuals, expected.residuals, near=0.0 if by_bits else NEAR, size=_largest_norm(means)
    )
    if found:
        return f"residual: {found}"
    near = NEAR_PARAMETERS if by_bits else NEAR
    found = first_difference(played.parameters, expected.parameters, near=near)
    return f"parameters: {found}" if found else ""


def first_difference(
    ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], *, near: float, size: float | None = None
) -> str:
    """Return where tensors differ; empty: nowhere. All in CPU memory.

    `near`: how large a difference may be beside `size`, by their norms; 0: bits are compared. `size`: by default
    the norm of what is expected.
    """
    if len(ours) != len(theirs):
        return f"{len(ours)} tensors instead of {len(theirs)}"
    for number, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        if our.shape != their.shape:
            return f"tensor {number} has shape {tuple(our.shape)} instead of {tuple(their.shape)}"
        if bool(torch.isnan(our).all() & torch.isnan(their).all()) or same_bits(our, their):
            continue
        # Zeros of either sign are the same number, and another pattern of bits: said, where bits are compared.
        away = our.double() - their.double()
        scale = float(their.double().norm()) if size is None else size
        if near and float(away.norm()) <= near * scale:
            continue
        wrong = (our.view(torch.int32) != their.view(torch.int32)).flatten().nonzero().flatten()
        first = int(wrong[0])
        return (
            f"{len(wrong)} of {our.numel()} numbers of tensor {number} differ, the first is element {first}: "
            f"{our.flatten()[first].item():.9g} instead of {their.flatten()[first].item():.9g}"
        )
    return ""


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two float32 tensors have the same bits."""
    return torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))


def ranks_differ(played: Sequence[Played]) -> str:
    """Return which rank has another mean than rank 0; empty: none."""
    for rank, each in enumerate(played[1:], start=1):
        for number, (ours, theirs) in enumerate(zip(each.means, played[0].means, strict=True)):
            found = first_difference(ours, theirs, near=0.0)
            if found:
                return f"mean of step {number} on rank {rank} is not that of rank 0: {found}"
    return ""


def _largest_norm(tensors: Sequence[torch.Tensor]) -> float:
    return max((float(each.double().norm()) for each in tensors), default=0.0)
