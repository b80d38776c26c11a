"""Rows of all ranks in which this rank's own keep their gradient: for a loss over the joined batch.

[Note: gradients of gathered rows] Each rank computes the loss of the joined batch from all ranks' rows, and lets
gradients flow back through its own rows alone. The exchange takes the mean over the ranks, in which rank r weighs
f_r / N: so what flows back to its rows is multiplied by N / f_r, and the mean is the sum over all rows, which is
the gradient of one process. A parameter of the loss itself (a temperature) has the same gradient on every rank,
which is then the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...comm.world.world import World


class _OwnRows(torch.autograd.Function):
    """`rows`, of which those from `begin` to `end` are `own`."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, rows: torch.Tensor, place: slice, scale: Callable[[], float]) -> Any:
        ctx.place, ctx.scale, ctx.shape = place, scale, own.shape
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        mine = gradients[0][ctx.place]
        own = mine * ctx.scale() if mine.shape == ctx.shape else mine.new_zeros(ctx.shape)
        return own, None, None, None


def with_own(own: torch.Tensor, rows: torch.Tensor, counts: Sequence[int], here: World) -> torch.Tensor:
    """Return `rows` of all ranks, of which this rank's are `own`. See [Note: gradients of gathered rows].

    Args:
        own: this rank's rows, with their gradient.
        rows: of all ranks, one rank after the other.
        counts: how many of them each rank has; 0 for a rank with a placeholder, which gets gradients of zero.
        here: the world.
    """
    weight = here.session.batch_weight
    factor = weight.factor

    def scale() -> float:
        mine = weight.at_backward(factor)
        return here.size / mine if mine else 0.0

    begin = sum(counts[: here.rank])
    found: torch.Tensor = _OwnRows.apply(own, rows, slice(begin, begin + counts[here.rank]), scale)
    return found


def has_gathered(tensor: torch.Tensor) -> bool:
    """Whether `tensor` was computed from rows of all ranks that `with_own` made."""
    seen: set[Any] = set()
    waiting = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name() == "_OwnRowsBackward":
            return True
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return False
