"""The outer step: what becomes of the averaged parameters when the mean change of the ranks is known.

One rule (DiLoCo, Douillard 2311.08105, algorithm 1, with torch's form of Nesterov) has local SGD and post-local
SGD (rate 1, no momentum), BMUF and Lookahead as special cases.

[Note: sign of a change] A change is what was before minus what is now, so that it stands where a gradient would: a
rank that stepped down a gradient has a change along it, and the outer step subtracts it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..core.vocabulary.sync_spec import SyncSpec


@torch.no_grad()
def outer_step(
    outer: Sequence[torch.Tensor], velocity: Sequence[torch.Tensor], change: Sequence[torch.Tensor], spec: SyncSpec
) -> None:
    """Apply the mean `change` of the ranks to `outer`, in place. See [Note: sign of a change].

    Args:
        outer: the averaged parameters; tensors of any floating dtype.
        velocity: the outer momentum, of the same shapes, updated in place; empty where `spec.momentum` is 0.
        change: of the same shapes; overwritten.
        spec: rate, momentum and its form.
    """
    if not outer:
        return
    if not spec.momentum:
        torch._foreach_add_(list(outer), list(change), alpha=-spec.outer_lr)
        return
    torch._foreach_mul_(list(velocity), spec.momentum)
    torch._foreach_add_(list(velocity), list(change))
    if spec.nesterov:
        torch._foreach_add_(list(change), list(velocity), alpha=spec.momentum)
        torch._foreach_add_(list(outer), list(change), alpha=-spec.outer_lr)
    else:
        torch._foreach_add_(list(outer), list(velocity), alpha=-spec.outer_lr)
