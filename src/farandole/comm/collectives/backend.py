"""The backend's all-reduce: begun and not waited for, or told to the current stream of a device."""

from __future__ import annotations

import torch
import torch.distributed as dist


def start_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to sum `tensor` over the group, in place; the tensor must not be touched until `wait`."""
    work: dist.Work | None = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None, "an asynchronous collective returns its work"
    return work


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum `tensor` over the group, in place; on a device the current stream does, and the host does not wait."""
    dist.all_reduce(tensor, group=group)
