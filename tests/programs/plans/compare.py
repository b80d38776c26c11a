"""Tensors beside each other: to the tolerance of their type, or to the bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from farandole.parallel.split import Split

Parts = Mapping[str, tuple[torch.Tensor, Split | None]]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
"""Relative to 1, or to the largest number of a tensor."""


def differs(found: torch.Tensor, right: torch.Tensor) -> str:
    """Return how two tensors differ; empty if they do not."""
    if found.shape != right.shape:
        return f"shape {tuple(found.shape)} for {tuple(right.shape)}"
    if not right.numel():
        return ""
    worst, largest = float((found - right).abs().max()), float(right.abs().max())
    near = TOLERANCE.get(found.dtype, 0.0) * max(1.0, largest)
    return "" if worst <= near else f"off by {worst:.3g} of {largest:.3g}"


def near(found: float, right: float, *, single: bool) -> bool:
    """Return whether two numbers are equal but for rounding; `single`: of float32."""
    return abs(found - right) <= TOLERANCE[torch.float32 if single else torch.float64] * (1 + abs(right))


def same_bits(ranks: Sequence[Parts]) -> str:
    """Return which parameter has other bits on a rank that has the same part of it; empty for none."""
    seen: dict[tuple[str, Split | None], tuple[int, torch.Tensor]] = {}
    for rank, parts in enumerate(ranks):
        for name, (tensor, split) in parts.items():
            first, expected = seen.setdefault((name, split), (rank, tensor))
            if expected.shape != tensor.shape or not torch.equal(expected, tensor):
                off = float((expected.double() - tensor.double()).abs().max())
                return f"{name} has other bits on rank {rank} than on rank {first}, by {off:.3g}"
    return ""
