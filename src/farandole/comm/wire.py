"""Collectives as the engine uses them: started, waited for, and their failures told in our words."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..core.errors import CommError, PeerLost, Stalled
from .world import World

_LOST = (
    "Connection closed by peer",
    "Connection reset",
    "Broken pipe",
    "Read error",
    "Write error",
    "Connection refused",
)
_STALLED = ("timed out", "timeout", "Timed out", "Timeout")


def start_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to sum `tensor` over the group, in place; the tensor must not be touched until `wait`."""
    work: dist.Work | None = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None, "an asynchronous collective returns its work"
    return work


def explain(problem: RuntimeError, world: World, operation: str, *, bucket: int | None = None) -> CommError:
    """Turn a back end's failure into ours: who is gone or late, as far as the back end knows."""
    text = str(problem)
    reason = text.strip().splitlines()[0] if text.strip() else type(problem).__name__
    if any(sign in text for sign in _STALLED):
        return Stalled(
            f"no answer within {world.timeout_seconds:g} s",
            rank=world.rank,
            operation=operation,
            bucket=bucket,
            remedy="another rank is stuck, or did not make this call",
        )
    if any(sign in text for sign in _LOST):
        return PeerLost(
            "another rank closed its connection",
            rank=world.rank,
            operation=operation,
            bucket=bucket,
            remedy="look for the first failure among the other ranks",
        )
    return CommError(reason, rank=world.rank, operation=operation, bucket=bucket)
