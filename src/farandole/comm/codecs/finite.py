"""Whether what codecs compute with is finite, asked at the price of one sum.

[Note: sums that overflow] Gradients that are finite on every rank may have a sum that is not, and then nothing
that a codec keeps is: asked - own is NaN from then on. The mean has the same bits on all ranks, so each of them
looks at it and all know the same: the exchange is taken back, as if it had not been. A codec that packs every
element shows every overflow in its mean. One that leaves elements out does not: the gradient and the residual of
one of these may add up to infinity while the mean is finite. Its rank sees that in its state before the next
exchange, forgets what is kept there, and says that its gradient is not finite. Where each rank has its rows of the
mean alone (ZeRO stages 1 and 2), the owner sees the overflow and tells the others, by one small all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..device.streams import streams_of
from .codec import S, leaves, with_leaves


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` holds no NaN and no infinity."""
    # The sum of finite numbers may overflow; only then is a second look worth its time.
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def finite_flag(tensor: torch.Tensor) -> bool | torch.Tensor:
    """Return `is_finite` of `tensor`; of one on a device a flag there, () of bool, without a wait of the host."""
    if streams_of(tensor.device) is None:
        return is_finite(tensor)
    return torch.isfinite(torch.linalg.vector_norm(tensor, torch.inf)) if tensor.numel() else True


def without_overflow(state: S, initial: Callable[[], S]) -> S:
    """Return `state` if its tensors are finite; else `initial()` with the numbers of `state`.

    Counters stay, because all ranks draw the same random numbers by them.
    """
    kept = leaves(state)
    tensors = [value for value in kept.values() if isinstance(value, torch.Tensor)]
    if all(is_finite(value) for value in tensors if value.is_floating_point()):
        return state
    return with_leaves(initial(), {key: leaf for key, leaf in kept.items() if not isinstance(leaf, torch.Tensor)})
