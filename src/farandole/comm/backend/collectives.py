"""The collectives of `torch.distributed`, each once, on what every exchange offers.

They run when all ranks have agreed on the call, so lengths and types are the same on all. Tensors here are flat
and contiguous, and are written in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...core.vocabulary.errors import Mismatch
from .exchanges.exchange import SAME_CALLS, GroupExchange
from .exchanges.reductions import combine

_REDUCE_BYTES = 8 * 2**20
"""The part of each rank's tensor that is sent at a time, where one rank receives those of all."""


def broadcast(exchange: GroupExchange, flat: torch.Tensor, root: int) -> None:
    """Give all ranks the tensor of `root`."""
    exchange.broadcast(as_bytes(flat), root)


def all_gather(exchange: GroupExchange, flat: torch.Tensor, outs: Sequence[torch.Tensor]) -> None:
    """Give all ranks the tensors of all, by rank."""
    exchange.all_gather(as_bytes(flat), [as_bytes(out) for out in outs])
    outs[exchange.rank].copy_(flat)


def gather(exchange: GroupExchange, flat: torch.Tensor, outs: Sequence[torch.Tensor], root: int) -> None:
    """Give `root` the tensors of all; the others have no `outs`."""
    if exchange.rank == root:
        exchange.publish(None, {rank: as_bytes(outs[rank]) for rank in _others(exchange)}, readers=[root])
        outs[root].copy_(flat)
    else:
        exchange.publish(as_bytes(flat), {}, readers=[root])


def scatter(exchange: GroupExchange, out: torch.Tensor, pieces: Sequence[torch.Tensor], root: int) -> None:
    """Give each rank its piece of those that `root` has; the others have no `pieces`."""
    if exchange.rank == root:
        outgoing = {rank: as_bytes(pieces[rank]) for rank in _others(exchange)}
        exchange.swap(outgoing, {}, out.nbytes)
        out.copy_(pieces[root])
    else:
        exchange.swap({}, {root: as_bytes(out)}, out.nbytes)


def reduce(exchange: GroupExchange, flat: torch.Tensor, root: int, operation: str) -> None:
    """Give `root` the tensors of all, combined; those of the others stay as they are."""
    step = max(1, _REDUCE_BYTES // flat.itemsize)
    for part in flat.split(step):
        if exchange.rank != root:
            gather(exchange, part, [], root)
            continue
        rows = [torch.empty_like(part) for _ in range(exchange.size)]
        gather(exchange, part, rows, root)
        combine(part, rows, operation)


def all_to_all(
    exchange: GroupExchange,
    outs: Sequence[torch.Tensor],
    pieces: Sequence[torch.Tensor],
    *,
    lengths: Sequence[Sequence[int]],
    call: str,
    names: Sequence[int],
) -> None:
    """Give each rank its piece of every rank's.

    `lengths`: of each rank, how many elements it sends to each, then how many it expects from each.

    Raises:
        Mismatch: on all ranks, when two of them disagree.
    """
    size = exchange.size
    for source in range(size):
        for target in range(size):
            sent, expected = lengths[source][target], lengths[target][size + source]
            if sent != expected:
                raise Mismatch(
                    f"rank {names[source]} sends {sent} elements to rank {names[target]}, "
                    f"which expects {expected}",
                    rank=names[exchange.rank],
                    operation=call,
                    remedy=SAME_CALLS,
                )
    longest = max(n for row in lengths for n in row) * (outs or pieces)[0].itemsize
    others = _others(exchange)
    outgoing = {rank: as_bytes(pieces[rank]) for rank in others}
    exchange.swap(outgoing, {rank: as_bytes(outs[rank]) for rank in others}, longest)
    outs[exchange.rank].copy_(pieces[exchange.rank])


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """Return the tensor's memory as uint8."""
    return flat.view(torch.uint8)


def _others(exchange: GroupExchange) -> list[int]:
    return [rank for rank in range(exchange.size) if rank != exchange.rank]
