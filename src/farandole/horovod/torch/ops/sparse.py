"""Allreduce of a sparse tensor: the indices and values of all ranks, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ...common.process_sets import ProcessSet, global_process_set
from ...common.reductions import Average, Sum
from .allgather import allgather_async
from .handles import synchronize, wait_for_all


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start the reduction of a sparse COO tensor.

    Args:
        tensor: a sparse tensor, the same shape and dtype on all ranks.
        name: the same on all ranks; None: a counter makes one.
        op: Average or Sum.
        process_set: the ranks that take part.

    Returns:
        A function that waits and returns the reduced sparse tensor. It is not coalesced: an index that several
        ranks have occurs several times.

    Raises:
        ValueError: the tensor is not sparse, or `op` is another one.
    """
    if not tensor.is_sparse:
        raise ValueError(f"sparse_allreduce_async: expected a sparse tensor, got {tensor.type()}")
    if op not in (Average, Sum):
        raise ValueError(f"sparse_allreduce_async: op={op!r}, expected Average or Sum")
    # No sum of duplicates here, and no copy: indices and values are taken as they are.
    indices, values = tensor._indices(), tensor._values()
    names = (None, None) if name is None else (f"{name}.indices", f"{name}.values")
    indices_handle = allgather_async(indices.t().contiguous(), names[0], process_set)
    values_handle = allgather_async(values.contiguous(), names[1], process_set)

    def wait() -> torch.Tensor:
        both = (partial(synchronize, handle) for handle in (indices_handle, values_handle))
        all_indices, all_values = wait_for_all(both)
        if op == Average:
            all_values = all_values / process_set.size()
        return torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape)

    return wait
