"""Sums of sparse tensors in coordinate format: the rows of all ranks, added in the order of ranks.

Every rank receives the indices and values of all others and adds them in the same order: all have the same
bits. Ranks may have different numbers of rows; they travel padded to the longest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..messages.reduce_rules import accumulates_in_fp32, divide
from . import collectives
from .exchanges.exchange import GroupExchange


def describe_sparse(tensor: torch.Tensor) -> str:
    """Return what must be equal on all ranks: "a sparse float32 of (1000, 16), 1 dimension of them sparse"."""
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"a sparse {kind} of {tuple(tensor.shape)}, {tensor.sparse_dim()} of its dimensions sparse"


def sum_sparse(
    exchange: GroupExchange, mine: torch.Tensor, operation: str, counts: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Return the sum or mean over ranks of sparse tensors, coalesced: the same bits on every rank.

    Args:
        exchange: the ranks.
        mine: this rank's tensor, coalesced.
        operation: ``SUM`` or ``AVG``.
        counts: of each rank, one number: its rows.
    """
    rows, width = [count for (count,) in counts], mine.sparse_dim()
    indices = _of_all(exchange, mine.indices().t(), rows)
    values = _of_all(exchange, mine.values(), rows)
    positions = [_positions(each, mine.shape[:width]) for each in indices]
    together, places = torch.unique(torch.cat(positions), return_inverse=True)
    wide = torch.float32 if accumulates_in_fp32(mine.dtype) else mine.dtype
    total = torch.zeros((len(together), *mine.shape[width:]), dtype=wide)
    for place, value in zip(places.split(rows), values, strict=True):
        # A rank has each position once: no two of these additions meet.
        total[place] = total[place] | value if wide == torch.bool else total[place] + value
    if operation == "AVG":
        divide(total, exchange.size)
    unraveled = torch.stack(torch.unravel_index(together, mine.shape[:width]))
    return torch.sparse_coo_tensor(
        unraveled, total.to(mine.dtype), mine.shape, is_coalesced=True, check_invariants=False
    )


def _of_all(exchange: GroupExchange, mine: torch.Tensor, rows: Sequence[int]) -> list[torch.Tensor]:
    """Return the rows of every rank; `mine`: (rows, ...)."""
    padded = torch.zeros((max(rows), *mine.shape[1:]), dtype=mine.dtype)
    padded[: len(mine)] = mine
    outs = [torch.empty_like(padded) for _ in rows]
    if padded.numel():
        collectives.all_gather(exchange, padded.reshape(-1), [out.view(-1) for out in outs])
    return [out[:count] for out, count in zip(outs, rows, strict=True)]


def _positions(indices: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the place of each index, (rows, dimensions), among all entries of `shape`: (rows)."""
    found = torch.zeros(len(indices), dtype=torch.int64)
    for dimension, count in enumerate(shape):
        found = found * count + indices[:, dimension]
    return found
